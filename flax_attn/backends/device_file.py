"""A device's proof for "auto": what `flax-attn check-device` found there, in a JSON file.

    {"format": "flax-attn device, format 1", "device": "NVIDIA H100 80GB HBM3",
     "capability": [9, 0], "versions": {"jax": "0.10.2", "jaxlib": "0.10.2", "flax_attn": "0.4.0"},
     "rows": [{"kind": "bfloat16, widths 64 and 64, ...", "backend": "pallas", "forward": true,
               "backward": true, "times": {"fwd": {"seconds": 1e-4, "ratio": 0.5,
               "interval": [0.4, 0.6]}, "fwd+bwd": {...}}}], "digest": "..."}

Each row is one request to one backend: its kind (`kind_of`), whether the output and whether also
the gradients equal the plain formula's, and for each pass the median of its seconds, and of their
ratio to those of blockwise, with its interval. A request that ended its process has the backend
`ANY`, which counts against all. The digest is the SHA-256 of all else.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jaxlib.version import __version__ as jaxlib_version

from .._internal.replacing import replacing
from .._internal.version import __version__
from ..masks import Mask
from ..rules import Request
from ..scores import Score
from ..where import device_kind_of, is_assumed
from .protocol import is_number

FORMAT = "flax-attn device, format 1"
VARIABLE = "FLAX_ATTN_DEVICE_FILE"
ANY = "-"
PASSES = ("fwd", "fwd+bwd")
LONG = 1024  # tokens, beyond which a proof at one length counts for all longer ones
SECONDS = 300  # how long the other processes of a job may take to come to the same file
NONE = "no device file is in use (flax_attn.use_device_file)"
ASSUMED = "no device file counts for an assumed platform"
EXPORTED = "jax.export reads no device file, since its program may run on another device"
BY_VARIABLE = "by the environment variable"


class Row(NamedTuple):
    """One request to one backend: its kind, what was equal, and by pass a ratio and its most."""

    kind: str
    backend: str
    equal: Mapping[str, bool]
    times: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Row":
        """Reads a row of a file."""
        equal = {name: row.get(name) is True for name in ("forward", "backward")}
        figures = (row.get("times") or {}).items()
        times = {name: (float(x["ratio"]), float(x["interval"][1])) for name, x in figures}
        return cls(row["kind"], row["backend"], equal, times)


@dataclasses.dataclass(frozen=True)
class DeviceFile:
    """A file that was read; equal by its digest, which is a part of the key of `jax.jit`."""

    digest: str
    device: str = dataclasses.field(compare=False)
    capability: tuple[int, ...] | None = dataclasses.field(compare=False)
    versions: Mapping[str, str] = dataclasses.field(compare=False)
    rows: Sequence[Row] = dataclasses.field(compare=False)


_in_use = jax.make_user_context(BY_VARIABLE)  # or a DeviceFile, or None
_numbers = count()  # of the files that this process has compared with those of others


class _Setting(AbstractContextManager[None]):
    """A setting that holds from the call on, and as a context manager until its end."""

    def __init__(self, file: DeviceFile | None):
        self._context, self._is_on = _in_use(file), False
        self.__enter__()

    def __enter__(self) -> None:
        if not self._is_on:
            self._context.__enter__()
            self._is_on = True

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        self._is_on = False


def use_device_file(path: str | os.PathLike[str] | None) -> AbstractContextManager[None]:
    """Lets "auto" take the backend "pallas" in place of "blockwise" where a device's file allows.

    `flax-attn check-device --out FOLDER` writes the file, FOLDER/device.json. "pallas" is taken for
    a request if every request of the same kind was equal to the formula in it, forward and
    backward, and surely faster than "blockwise", in both passes. A kind is the dtype, the head
    widths, the classes of the mask and the score, sinks, dropout, grouped heads, whether T equals
    S, and whether there are more than 1,024 tokens; `explain` prints it. What the file does not
    have is not proven. Like "cudnn", "pallas" has first derivatives only.

    Holds from the call on in this thread; as a context manager, until its end. `jax.jit` traces
    again for a file of other contents. The environment variable FLAX_ATTN_DEVICE_FILE names the
    file of a whole process, which then reads it once, at the first request that needs it.

    A file of another device kind, compute capability, or version of jax, jaxlib or flax_attn counts
    for nothing. So does any file for an assumed platform without a `device_kind`, and for what
    `jax.export` traces; a function that was already traced is exported as it is, so call
    `use_device_file(None)` first. In a job of several processes all must use a file of the same
    contents: call it in each, after `jax.distributed.initialize`.

    Args:
      path: the file, or None for none, not even that of the environment variable.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is broken or has another format; if the processes of a job differ.

    >>> import jax.numpy as jnp
    >>> from flax_attn import explain, use_device_file
    >>> x = jnp.ones((5, 2, 4))
    >>> with use_device_file(None):
    ...     print(explain(x, x, x)[3])
    passed over: no device file is in use (flax_attn.use_device_file); backend="pallas" asks for it
    """
    return _Setting(None if path is None else _agreed(path))


def versions() -> dict[str, str]:
    """The versions that a file is for."""
    return {"jax": jax.__version__, "jaxlib": jaxlib_version, "flax_attn": __version__}


def write(path: Path, device: str, capability: Sequence[int] | None, rows: Sequence[Any]) -> None:
    """Writes a file atomically, for these versions."""
    content = {"format": FORMAT, "device": device, "capability": capability}
    content |= {"versions": versions(), "rows": rows}
    document = {**content, "digest": _digest(content)}
    with replacing(path) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: str | os.PathLike[str]) -> DeviceFile:
    """Reads a file.

    Raises:
      FileNotFoundError, ValueError: as `use_device_file` does.
    """
    remedy = "`flax-attn check-device --out FOLDER` writes FOLDER/device.json."
    try:
        document = json.loads(Path(path).read_bytes())
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no device file {path}: {remedy}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is broken, it is no JSON: {remedy}") from error
    form = document.get("format") if isinstance(document, dict) else None
    if form != FORMAT:
        raise ValueError(f"{path} has the format {form!r}, not {FORMAT!r}: {remedy}")
    digest = document.pop("digest", None)
    if digest != _digest(document):
        raise ValueError(f"{path} is broken, its digest does not fit its contents: {remedy}")
    try:
        capability = document["capability"] and tuple(document["capability"])
        known = {name: document["versions"][name] for name in versions()}
        rows = [Row.of(row) for row in document["rows"]]
        return DeviceFile(digest, document["device"], capability, known, rows)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is broken, a field is missing or wrong: {remedy}") from error


def _agreed(path: str | os.PathLike[str]) -> DeviceFile:
    """Reads a file; of several processes each must have read the same.

    They compare digests by the service that `jax.distributed` keeps, and by no computation on their
    devices: a program may be about to be traced here, and where one process reads no file the
    others end, in place of waiting for it.
    """
    file = read(path)
    if jax.process_count() == 1:
        return file
    client = import_module("jax._src.distributed").global_state.client
    if client is None:
        raise ValueError(
            f"{path} cannot be compared with the device files of the other processes: "
            "jax.distributed.initialize must come first."
        )
    prefix = f"flax_attn/device_file/{next(_numbers)}"
    client.key_value_set(f"{prefix}/{jax.process_index()}", file.digest)
    for process in range(jax.process_count()):
        try:
            other = client.blocking_key_value_get(f"{prefix}/{process}", 1000 * SECONDS)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"Process {process} has taken no device file within {SECONDS} seconds, and this "
                f"one, {jax.process_index()}, has taken {path}: use the same in each, or none."
            ) from error
        if other != file.digest:
            raise ValueError(
                f"The device file of process {process} has the digest {other}, and {path}, that of "
                f"process {jax.process_index()}, has {file.digest}: use the same in each, since "
                "processes of one job must run one program."
            )
    return file


# Once for each name, so that a process keeps what it has read first.
_of_variable = cache(_agreed)


def _current() -> DeviceFile | None:
    """The file in use, which is read now if the environment names it."""
    if _in_use.value != BY_VARIABLE:
        return _in_use.value
    path = os.environ.get(VARIABLE)
    return _of_variable(path) if path else None


def against(backend: str, request: Request) -> str | None:
    """Why the file in use does not let "auto" take a backend for a request, or None if it does."""
    if is_assumed() and device_kind_of(request.q) is None:
        return ASSUMED
    if _in_use.value is None or (_in_use.value == BY_VARIABLE and not os.environ.get(VARIABLE)):
        return NONE
    if _is_exported():
        return EXPORTED
    file = _current()
    assert file is not None
    pairs: list[tuple[str, Any, Any]] = [("device", file.device, device_kind_of(request.q))]
    pairs += [("capability", file.capability, request.where.capability)]
    pairs += [(name, file.versions[name], version) for name, version in versions().items()]
    for name, recorded, current in pairs:
        if recorded != current:
            what = "" if name == "device" else f"{name} "
            return f"the device file is of {what}{_text(recorded)}; this is {_text(current)}"
    return _unproven(file, backend, kind_of(request))


def _text(value: Any) -> str:
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _unproven(file: DeviceFile, backend: str, kind: str) -> str | None:
    rows = [row for row in file.rows if row.kind == kind and row.backend in (backend, ANY)]
    if not rows:
        return f"the device file proves nothing of such requests ({kind})"
    for row in rows:
        for name, equal in row.equal.items():
            if not equal:
                return f"by the device file it was not equal to the formula there, {name} ({kind})"
    for row in rows:
        for which in PASSES:
            if which not in row.times:
                return f"the device file has no time of it there ({kind})"
            ratio, most = row.times[which]
            if not most < 1:
                was = "slower" if ratio >= 1 else "not surely faster"
                text = f"{ratio:.2g} times blockwise's time, {which}"
                return f"by the device file it was {was} there ({text}; {kind})"
    return None


def _is_exported() -> bool:
    """Whether `jax.export` traces the program, of which JAX has no other sign than its frame."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("jax._src.export."):
            return True
        frame = frame.f_back
    return False


def kind_of(request: Request) -> str:
    """What requests share for which one proof counts, in words.

    The dtype, with the precision of products that is asked for unless JAX's own or the highest;
    both head widths; the classes of the mask and of the score, and whether the score reads arrays
    that may be trained, by its fields or by a function's closure; sinks; dropout; positions; an
    array as scale; whether several query heads share a key head; `places` within a `jax.shard_map`;
    the order of T and S; and whether the longer is longer than `LONG`. The numbers in masks and
    scores, as a window's width, are no part of it, nor what a `MaskFn` or `ScoreFn` computes: for a
    kernel these are one kind each.

    >>> import jax.numpy as jnp
    >>> from flax_attn.rules import rules_of
    >>> x = jnp.ones((20, 4, 16))
    >>> kind_of(Request.of(x, x, x, rules_of()))
    'float32, widths 16 and 16, mask Full, score Identity, T = S, up to 1024 tokens'
    """
    rules, sizes = request.rules, request.sizes
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    trained = any(isinstance(x, Tracer) for x in jax.tree.leaves(rules.score))
    facts = {
        f"{precision} products": precision not in (None, "highest"),
        "arrays in the score": trained or _has_closure(rules.score),
        "sinks": rules.sinks is not None,
        type(rules.dropout).__name__: rules.dropout is not None,
        "positions": rules.positions is not None,
        "an array as scale": not (rules.scale is None or is_number(rules.scale)),
        "grouped heads": request.k.shape[-2] != sizes.N,
        "places": request.places is not None,
    }
    T, S = sizes.T, sizes.S
    order, length = "lengths of any size", ""
    if isinstance(T, int) and isinstance(S, int):
        order = f"T {'=' if T == S else '<' if T < S else '>'} S"
        length = f"{'over' if max(T, S) > LONG else 'up to'} {LONG} tokens"
    widths = f"widths {request.q.shape[-1]} and {request.v.shape[-1]}"
    parts = [str(request.q.dtype), widths, f"mask {_classes(rules.mask)}"]
    parts += [f"score {_classes(rules.score)}", *(name for name, holds in facts.items() if holds)]
    return ", ".join(filter(None, [*parts, order, length]))


def _parts(node: Any) -> list[Any]:
    return [getattr(node, field.name) for field in dataclasses.fields(node)]


def _classes(node: Mask | Score) -> str:
    """The class of a mask or a score, and those of its parts; `&` and `|` have them in any order.

    A class that is not this library's has its module's name, which no drawn request has.
    """
    cls = type(node)
    name = (
        cls.__name__
        if cls.__module__.startswith("flax_attn.")
        else f"{cls.__module__}.{cls.__qualname__}"
    )
    parts = [_classes(part) for part in _parts(node) if isinstance(part, Mask | Score)]
    parts = sorted(parts) if isinstance(node, Mask) else parts
    return f"{name}({', '.join(parts)})" if parts else name


def _has_closure(node: Score) -> bool:
    """Whether a function in a score may read arrays that it closes over."""
    return any(
        _has_closure(part) if isinstance(part, Score) else callable(part) and _closes(part)
        for part in _parts(node)
    )


def _closes(function: Any) -> bool:
    return getattr(function, "__closure__", ()) is not None
