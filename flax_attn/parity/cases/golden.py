"""Goldens: compact records of torch's results, for running parity checks without torch.

Weights and inputs are drawn again. Small results are stored in full; large ones as 48 random
projections, each over every 48th element, which a wrong result cannot match by chance.
"""

import hashlib
import itertools
import json
import os
import shlex
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.described import Source
from ...weights.npz import read_npz
from ...weights.plan import make_plan
from ...weights.rule import Rule
from .. import draw, judge
from ..compare import make_pair
from ..decode import Decode
from ..groups import fills, groups
from ..options import Options
from ..report import Report, Row
from ..rows.decoding import name_of, stepwise
from ..rows.values import gradients, same_structure, structure
from ..sides.flax.side import Flax
from ..sides.match import hidden
from ..sides.pair import Names, Pair, canonical, matches
from ..sides.run import Run, RunRequest, is_floating, rounded
from ..sides.steps import FlaxSteps, decoded, joined, output_of
from ..sides.torch.live import Live
from ..versions import versions
from .home import LIBRARY, Home, is_from_this_library

Call = Callable[..., Any]
SKETCH = 48
SMALLER = 2.0**-64  # scales values near the dtype's maximum so that their sum does not overflow
MAX_BYTES = 2**28  # of all arrays of a file, and of its description
FORMAT = 1  # file format; files without the field have this format
CHANGED = "what it holds is not what was recorded"
# Exceptions that reading a truncated, corrupted or foreign file may raise.
DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError)
DAMAGE += (zlib.error, MemoryError, RecursionError, OverflowError)


@runtime_checkable
class Recorded(Protocol):
    """What a golden needs from a case; avoids a circular import of `Case`."""

    flax_class: type[nnx.Module]
    flax_call: Call
    torch_call: Call
    rules: tuple[Rule, ...]
    constants: tuple[str, ...]
    dtypes: tuple[str, ...]
    train: bool
    decode: Decode | None
    seed: int
    home: Home

    @property
    def variant(self) -> str: ...
    @property
    def reproduce(self) -> str: ...
    @property
    def titles(self) -> tuple[str, str]: ...
    def arrays(self) -> dict[str, np.ndarray]: ...
    def flax_module(self) -> nnx.Module: ...
    def torch_module(self) -> Any: ...


def sketch(name: str, array: np.ndarray, filled: str = "") -> np.ndarray:
    """The flattened array itself if small, else 48 random projections of it.

    Infinities count as 0, and so do fills of the dtype `filled`, if given; a checksum of their
    positions is added as one more value. Huge values are projected separately.
    """
    wide = judge.real(array)
    shown = np.isfinite(wide) & (fills(wide, filled) == 0 if filled else True)
    wide = np.where(shown, wide, 0).ravel()
    places = [] if shown.all() else [zlib.crc32(shown.tobytes()) / 2**32]
    part = groups(wide)
    rest = np.append(np.where(part == 0, wide, 0), places)
    huge = (np.where(part == i, wide, 0) for i in range(1, int(part.max(initial=0)) + 1))
    sums = [_sums(f"{name}/{i}", x) for i, x in enumerate(huge)]
    return np.concatenate([_sums(name, rest), *sums])


def _sums(name: str, flat: np.ndarray) -> np.ndarray:
    """Random projections, of downscaled values if the sums would overflow."""
    if flat.size <= SKETCH:
        return flat
    drawn = draw.normal(0, f"sketch/{name}", flat.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _columns(flat * drawn)
    return sums if np.isfinite(sums).all() else _columns(flat * SMALLER * drawn)


def _columns(flat: np.ndarray) -> np.ndarray:
    return np.pad(flat, (0, -flat.size % SKETCH)).reshape(-1, SKETCH).sum(axis=0)


def path_of(case: Recorded) -> Path:
    """The file with a variant's goldens, in the package that defines the case.

    Goldens of this library's own cases are part of the library.

    Raises:
      ParityError: if the case is not defined in a file.
    """
    home = LIBRARY / "flax_attn" if case.home.is_own(case.flax_class) else case.home.folder
    return home / "goldens" / f"{case.variant}.npz"


def _read_from(case: Recorded) -> Path:
    """The file to read: the library's own for its layers in a case defined outside any file."""
    if is_from_this_library(case.flax_class) and not case.home.in_file:
        return LIBRARY / "flax_attn" / "goldens" / f"{case.variant}.npz"
    return path_of(case)


def record(cases: Sequence[Recorded]) -> Path:
    """Writes torch's results for the cases of one variant to its file, and returns the path.

    Raises:
      ParityError: if case names collide, a case cannot be compared, or writing fails.
    """
    _check_names(cases)
    arrays, entries, path = {}, {}, path_of(cases[0])
    for i, case in enumerate(cases):
        entry, pieces = _record_case(case)
        entries[str(case)] = {**entry, "at": i}
        arrays |= {f"{i}/{dtype}": x for dtype, x in pieces.items()}
    meta = {"format": FORMAT, "versions": versions(), "cases": entries}
    text = json.dumps({**meta, "digest": _digest(arrays, meta)}).encode()
    arrays["meta"] = np.frombuffer(zlib.compress(text, 9), np.uint8)
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        with part.open("wb") as file:  # written aside, then renamed: readers see no partial file
            np.savez_compressed(file, **arrays)
        os.replace(part, path)
    except OSError as error:
        raise ParityError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def _check_names(cases: Sequence[Recorded]) -> None:
    modules: dict[str, list[str]] = {}
    for case in cases:
        modules.setdefault(str(case), []).append(case.home.module)
    for name, holders in modules.items():
        if len(holders) > 1:
            raise ParityError(
                f"{len(holders)} cases have one name, {name} (of {', '.join(holders)}): give each "
                "a name of its own, Case(name=...)."
            )


def replay(case: Recorded, dtypes: Sequence[str], eager: bool) -> Report:
    """Compares the Flax side of a case with its golden.

    Raises:
      ParityError: if the case or one of `dtypes` was not recorded, or the record is damaged.
    """
    path, command = _read_from(case), f"`{_record_command(case)}` where torch is installed"
    stored, meta = _load(path, command)
    title = next((title for title in case.titles if title in meta["cases"]), None)
    if title is None:
        raise ParityError(f"{case} is not recorded in {path.name}: run {command}.")
    entry = meta["cases"][title]
    sources = _checked(entry, stored, f"{path}, the record of {case},", command)
    missing = [dtype for dtype in dtypes if dtype not in entry["results"]]
    if missing:
        raise ParityError(f"{case} is not recorded in {', '.join(missing)}: run {command}.")
    module = case.flax_module()
    plan = make_plan(sources, module, case.rules)
    values = draw.parameters(case.seed, sources)
    rows: list[Row] = []
    for dtype in dtypes:
        weights = canonical(plan.forward({k: rounded(v, dtype) for k, v in values.items()}), module)
        known = entry["results"][dtype], stored[f"{entry['at']}/{dtype}"]
        for mode in ("eager", "jit") if eager and dtype == "float64" else ("jit",):
            side = Flax(module, case.flax_call, _request(case, dtype), dtype, mode == "jit")
            run = side.run(weights)
            rows += _judge(run, *known, dtype, mode)
            if case.decode is not None and dtype == dtypes[0] and mode == "jit":
                steps = FlaxSteps(side, weights, case.decode)
                rows += _judged_steps(steps, run, list(_pieces(*known)), f"{case}", command)
    recorded = meta["versions"]
    return Report(
        str(case),
        tuple(rows),
        params=sum(len(move.sources) for move in plan.moves),
        constants=plan.constants,
        versions={**versions(), "torch": f"{recorded['torch']} (recorded)"},
        reproduce=case.reproduce,
    )


def _record_command(case: Recorded) -> str:
    package = "" if case.home.is_own(case.flax_class) else f" {shlex.quote(case.home.name)}"
    return f"flax-attn parity --record {case.variant}{package}"


def _load(path: Path, command: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """A file's arrays and their metadata; empty if there is no file."""
    if not path.exists():
        return {}, {"cases": {}}
    try:
        stored = _arrays(path)
        meta = json.loads(_inflated(stored["meta"].tobytes()))
        known = isinstance(meta["cases"], dict) and isinstance(meta["versions"]["torch"], str)
        file_format = meta.get("format", FORMAT)
    except DAMAGE as error:
        raise ParityError(_damaged(str(path), error, command)) from error
    if file_format != FORMAT or not known:
        what = f"of format {file_format!r}" if file_format != FORMAT else "of no known format"
        raise ParityError(
            f"{path} is {what}, written by another version of flax_attn; this one reads format "
            f"{FORMAT}: run {command}."
        )
    if meta.get("digest", "none") not in ("none", _digest(stored, meta)):
        raise ParityError(_damaged(str(path), ValueError(CHANGED), command))
    return stored, meta


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file; what it declares is added up before any memory is taken."""
    entries = read_npz(path)
    if sum(entry.nbytes for entry in entries.values()) > MAX_BYTES:
        raise ValueError(f"it declares more than {MAX_BYTES} bytes")
    return {name: entry.read(name) for name, entry in entries.items()}


def _inflated(packed: bytes) -> bytes:
    unpack = zlib.decompressobj()
    text = unpack.decompress(packed, MAX_BYTES)
    if not unpack.eof:
        raise ValueError(f"its description ends early or has more than {MAX_BYTES} bytes")
    return text


def _digest(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    """Hash of all arrays of a file and of their metadata.

    Files written by earlier versions have none.
    """
    facts = {key: value for key, value in meta.items() if key != "digest"}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(arrays.keys() - {"meta"}):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _checked(entry: Any, stored: dict[str, np.ndarray], what: str, command: str) -> list[Source]:
    """Validates a case's record and returns its described tensors."""
    try:
        sources = [Source.from_json(fields) for fields in entry["sources"]]
        for dtype, result in entry["results"].items():
            numbers = stored[f"{entry['at']}/{dtype}"]
            sizes = [size for _, _, size, _, _ in result["facts"]]
            strange = {kind for kind, *_ in result["facts"]} - {
                "tap",
                "output",
                "gradient",
                "decode",
            }
            if strange:
                raise ValueError(f"it holds {strange}")
            if numbers.shape != (sum(sizes),) or numbers.dtype != np.float64:
                raise ValueError(f"{numbers.shape} numbers of {dtype} where {sum(sizes)} belong")
            if not np.isfinite(numbers).all():
                raise ValueError(f"NaN or Inf is among its numbers of {dtype}")
            _ = result["keeps"], result["outputs"]
    except DAMAGE as error:
        raise ParityError(_damaged(what, error, command)) from error
    return sources


def _damaged(what: str, error: Exception, command: str) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    why = f"{message} is missing" if isinstance(error, KeyError) else message
    return f"{what} is damaged ({why}): run {command}."


def _request(case: Recorded, dtype: str) -> RunRequest:
    inputs = {name: rounded(x, dtype) for name, x in case.arrays().items()}
    constants = frozenset(case.constants)
    return RunRequest((), inputs, case.seed, case.train, True, dtype == "float64", constants)


def _record_case(case: Recorded) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    torch_module, module = case.torch_module(), case.flax_module()
    results, arrays = {}, {}
    options = Options(rules=case.rules, flax_call=case.flax_call)
    original = Live(torch_module, case.torch_call, _request(case, "float64"))
    pair = make_pair(original, module, options)
    for dtype in case.dtypes:
        _, (got, torch_run, truth) = next(pair.run(dtype, ["jit"]))
        facts, pieces = [], []
        entries = _results(got, torch_run, truth, pair.names, dtype)
        if case.decode is not None and case.decode.torch and dtype == case.dtypes[0]:
            runs = got, torch_run, truth
            entries = itertools.chain(entries, _steps(pair, case.decode, runs, dtype))
        for kind, name, want, scale, error in entries:
            pieces.append(sketch(name, want, _filled(kind, dtype)))
            facts.append([kind, name, int(pieces[-1].size), scale, error])
        results[dtype] = {"facts": facts, "keeps": _print_of(got), "outputs": structure(torch_run)}
        arrays[dtype] = np.concatenate(pieces)
    sources = [source.to_json() for source in original.sources]
    return {"sources": sources, "results": results}, arrays


def _results(got: Run, torch_run: Run, truth: Run, names: Names, dtype: str):
    """Yields kind, name, value, scale and torch's own error of everything that is recorded."""
    if dtype == "float64":
        for _, flax_name, match in matches(got, truth, names):
            yield "tap", flax_name, match.value, None, None
    for name, want in truth.outputs.items():
        if is_floating(want):
            sketches = sketch(name, torch_run.outputs[name], dtype), sketch(name, want, dtype)
            yield "output", name, want, None, judge.error(*sketches)
        else:
            yield "output", name, torch_run.outputs[name], None, None
    for name, want, scale, error in gradients(torch_run, truth, names, dtype):
        yield "gradient", name, want, scale, error


def _steps(pair: Pair, decode: Decode, runs: tuple[Run, Run, Run], dtype: str):
    """Yields the results of torch's own steps for each split, in the format of `_results`."""
    steps = decoded(pair, decode, runs, dtype, "jit")
    for cut in steps.cuts:
        torch_steps, want = (joined(x[cut].outputs, steps.axis) for x in (steps.torch, steps.truth))
        assert torch_steps is not None and want is not None  # `decoded` checks the token counts
        name = name_of(cut)
        sketches = sketch(name, torch_steps, dtype), sketch(name, want, dtype)
        yield "decode", name, want, None, judge.error(*sketches)


def _filled(kind: str, dtype: str) -> str:
    """The dtype whose fills count as 0 in a sketch, or ""."""
    return dtype if kind in ("output", "decode") else ""


def _pieces(stored: dict[str, Any], numbers: np.ndarray):
    """Yields kind, name, scale, torch's own error and sketch of everything recorded."""
    at = 0
    for kind, name, size, scale, torch_error in stored["facts"]:
        yield kind, name, scale, torch_error, numbers[at : at + size]
        at += size


def _judge(run: Run, stored: dict[str, Any], numbers: np.ndarray, dtype: str, mode: str):
    """Compares sketches; the dropout masks must equal those at recording time."""
    if _print_of(run) != stored["keeps"]:
        note = "this jax draws other dropout masks than the one that recorded: record again"
        yield Row(
            "keep", "exact", dtype, mode, judge.Verdict("exact", float("inf"), 0.0, note=note)
        )
        return
    yield same_structure(structure(run), stored["outputs"], dtype, mode)
    taps = {k: hidden(x) if run.point(k) == "scores" else x for k, x in run.taps.items()}
    values = {"tap": taps, "output": run.outputs, "gradient": run.gradients}
    for kind, name, scale, torch_error, want in _pieces(stored, numbers):
        if kind == "decode":
            continue
        value = values[kind].get(name)
        if value is None:
            got = np.full(want.size, np.nan)
        else:
            got = sketch(name, value, _filled(kind, dtype))
        zero = kind == "gradient"
        if kind == "output" and value is not None and not is_floating(value):
            verdict = judge.same_values(got, want)
        elif dtype == "float64":
            verdict = judge.same_function(got, want, scale, zero)
        else:
            verdict = judge.within_precision(got, torch_error, want, dtype, scale, zero)
        yield Row(name, kind, dtype, mode, verdict)


def _judged_steps(steps: FlaxSteps, run: Run, pieces: list, what: str, command: str):
    """Compares Flax's steps with the recorded ones of torch, or with its full forward pass.

    In float64 also with Flax's own full forward pass, which locates the first step that differs.
    """
    dtype, mode = steps.side.dtype, "jit" if steps.side.jit else "eager"
    axis = steps.axes[steps.first]
    output = output_of(run.outputs, steps.tokens, axis)
    by_name = {(kind, name): (torch_error, want) for kind, name, _, torch_error, want in pieces}
    for cut in steps.decode.checked(steps.request.arrays()):
        outputs = steps.run(cut).outputs
        kind, name = ("decode", name_of(cut)) if steps.decode.torch else ("output", output)
        if (kind, name) not in by_name:
            raise ParityError(f"{what} is not recorded step by step ({cut}): run {command}.")
        (torch_error, want), value = by_name[kind, name], joined(outputs, axis)
        got = np.full(want.size, np.nan) if value is None else sketch(name, value, dtype)
        if dtype == "float64":
            verdict = judge.same_function(got, want)
            whole = [*cut.pieces(run.outputs[output], axis)]
            own_whole, _ = stepwise(cut, axis, outputs, whole, whole, dtype)
            yield Row(f"{name_of(cut)}, Flax's whole", "decode", dtype, mode, own_whole)
        else:
            verdict = judge.within_precision(got, torch_error, want, dtype)
        yield Row(name_of(cut), "decode", dtype, mode, verdict)


def _print_of(run: Run) -> list[int]:
    return [zlib.crc32(np.packbits(keep).tobytes()) for keep in run.keeps]
