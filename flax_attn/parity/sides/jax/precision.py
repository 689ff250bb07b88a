"""Finds narrowing casts, low-precision products, callbacks and unread inputs in a jaxpr.

A CPU multiplies at full precision whatever is requested, so lost precision does not show in its
results; the jaxpr shows it. The bodies of `jit`, `scan`, `cond`, `remat`, custom derivatives and so
on are searched too; a custom backward pass only in the jaxpr of a gradient.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import DotAlgorithmPreset, Precision
from jax.tree_util import keystr, tree_leaves_with_path

PARITY_DIR = Path(__file__).parents[2]
# Aliases of JAX's precisions, ordered from least to most precise.
LEVELS = {
    **dict.fromkeys(("default", "bfloat16", "fastest"), 0),
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x"), 1),
    **dict.fromkeys(("highest", "float32"), 2),
}
# Bits of a float that the operands and sums of an algorithm for products keep.
OPERANDS = {"BF16": 16, "F16": 16, "TF32": 19, "F32": 32, "F64": 64}
# Primitives that make random bits from a key.
RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")
# Primitives that call Python while the program runs.
CALLBACKS = ("pure_callback", "io_callback")
# Libraries between user code and jax: reported only if the traceback contains no user line.
LIBRARIES = ("flax", "optax", "einops", "jaxtyping", "beartype")


@dataclass(frozen=True)
class Finding:
    """One finding about one source line.

    Attributes:
      what: the finding, starting with a verb: "casts float64 to float32".
      file: the full path, "" if the traceback contains only jax's own lines.
      line: counted from 1.
      function: qualified name of the function.
    """

    what: str
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        if not self.file:
            return f"jax itself {self.what}"
        owner = _owner(self.file)
        name = _after(self.file, owner) if owner in LIBRARIES else os.path.basename(self.file)
        return f"{name}:{self.line} ({self.function}) {self.what}"


def casts(jaxpr: Any) -> list[Finding]:
    """Returns casts to floats narrower than the widest input, once per source line.

    Casts from integers (such as positions) and `lax.reduce_precision` count; from bool they do not.

    Args:
      jaxpr: from `jax.make_jaxpr(f)(x)` or `jax.jit(f).trace(x).jaxpr`.

    Example:

    >>> import jax
    >>> x = jnp.ones(3, jnp.float32)
    >>> for finding in casts(jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16) + 1)(x)):
    ...     print(finding.what)
    casts float32 to bfloat16
    """
    run = max(map(_bits, (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars)), default=0)
    return _unique_findings(jaxpr, lambda eqn: _narrowing(eqn, run))


def products(jaxpr: Any, requested: str = "highest") -> list[Finding]:
    """Returns float products and convolutions below the requested precision, once per line.

    Includes those whose result is narrower than their operands.

    Args:
      jaxpr: traced under `jax.default_matmul_precision(requested)`.
      requested: one of jax's precision names.

    Raises:
      ValueError: for any other name.

    Example:

    >>> import jax
    >>> x = jnp.ones((3, 3), jnp.float32)
    >>> product = lambda x: jnp.matmul(x, x, precision="default")
    >>> for finding in products(jax.make_jaxpr(product)(x)):
    ...     print(finding.what)
    multiplies (dot_general) at precision default, where highest is asked
    """
    if requested not in LEVELS:
        raise ValueError(f"asked must be one of {', '.join(LEVELS)}; got {requested!r}.")
    # A program of 16-bit floats may round a wider operand to them.
    run = max(map(_bits, jaxpr.jaxpr.invars), default=0)
    return _unique_findings(jaxpr, lambda eqn: _low_precision(eqn, requested, run))


def widened(jaxpr: Any) -> list[Finding]:
    """Returns products in user code of floats wider than all inputs, once per line.

    Products in libraries, this one included, are not reported.

    >>> import jax
    >>> x = jnp.ones((3, 3), jnp.bfloat16)
    >>> wide = lambda x: (x.astype(jnp.float32) @ x.astype(jnp.float32)).astype(x.dtype)
    >>> for finding in widened(jax.make_jaxpr(wide)(x)):
    ...     print(finding.what)
    multiplies in float32 amid bfloat16
    """
    ins = [x for x in (*jaxpr.jaxpr.invars, *jaxpr.jaxpr.constvars) if _bits(x)]
    run = max(map(_bits, ins), default=0)
    names = _dtypes([x for x in ins if _bits(x) == run][:1])

    def describe(eqn: Any) -> str:
        product = eqn.primitive.name == "dot_general" and min(map(_bits, eqn.invars[:2])) > run > 0
        return f"multiplies in {_dtypes(eqn.invars[:1])} amid {names}" if product else ""

    findings = _unique_findings(jaxpr, describe)
    return [x for x in findings if x.file and is_user_code(x.file)]


def calls(jaxpr: Any, primitives: Sequence[str], what: str) -> list[Finding]:
    """Returns where a program runs one of these primitives, such as `RANDOM`, once per line.

    >>> import jax
    >>> drop = lambda key, x: jnp.where(jax.random.bernoulli(key, 0.9), x, 0.0)
    >>> program = jax.make_jaxpr(drop)(jax.random.key(0), 1.0)
    >>> {finding.what for finding in calls(program, RANDOM, "draws random numbers")}
    {'draws random numbers'}
    """
    return _unique_findings(jaxpr, lambda eqn: what * (eqn.primitive.name in primitives))


def unread(traced: Any, args: tuple[Any, ...], grads: bool) -> list[str]:
    """A note on inputs of a `Flax` run that have no gradients, and on which no output depends."""
    outputs, inputs = (
        [keystr(path) for path, _ in tree_leaves_with_path(x)] for x in (traced.out_info, args)
    )
    is_output = [name.startswith(("[0]", "[1]['exact']")) for name in outputs]
    _, used = dce_jaxpr(traced.jaxpr.jaxpr, is_output)
    kinds = ("[3]['inputs']",) if grads else ("[3]['inputs']", "[1]")
    unused = [name for name, is_used in zip(inputs, used, strict=True) if not is_used]
    names = [name.split("'")[-2] for name in unused if name.startswith(kinds)]
    return [f"no output of Flax depends on input {', '.join(names)}"] if names else []


def _unique_findings(jaxpr: Any, describe: Callable[[Any], str]) -> list[Finding]:
    """Returns unique findings; one of the backward pass only if it is not in the forward too."""
    findings = {}
    for eqn, place in _equations(jaxpr, Place()):
        what = describe(eqn)
        if what and place.finding(what) not in findings:
            findings[place.finding(what, place.backward)] = None
    return list(findings)


def _low_precision(eqn: Any, requested: str, run: int) -> str:
    """Describes how a product of a `run`-bit program falls short of a precision, or ""."""
    wide = max(map(_bits, eqn.invars[:2]), default=0)
    if "precision" not in eqn.params or not wide:
        return ""
    name, precision = eqn.primitive.name, eqn.params["precision"]
    if _level(precision, min(wide, run or wide)) < LEVELS[requested]:
        return f"multiplies ({name}) {_precision_text(precision)}, where {requested} is asked"
    if 0 < _bits(eqn.outvars[0]) < wide:
        return f"multiplies ({name}) {_dtypes(eqn.invars[:2])} into {_dtypes(eqn.outvars)}"
    return ""


def _narrowing(eqn: Any, run: int) -> str:
    """Describes how an equation loses precision in a program of `run`-bit floats, or ""."""
    if eqn.primitive.name == "reduce_precision":
        return f"rounds to {eqn.params['mantissa_bits']} bits of mantissa"
    if eqn.primitive.name == "iota" and 0 < _bits(eqn.outvars[0]) < run:
        return f"counts in {_dtypes(eqn.outvars)}"
    if eqn.primitive.name != "convert_element_type":
        return ""
    old, new = eqn.invars[0], eqn.outvars[0]
    limit = min(_bits(old) or run, run or _bits(old))
    lost = 0 < _bits(new) < limit and old.aval.dtype != bool
    return f"casts {old.aval.dtype} to {new.aval.dtype}" if lost else ""


def _bits(var: Any) -> int:
    """Bits of a floating variable, or of one component if it is complex; else 0."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    return jnp.finfo(dtype).bits


def _dtypes(variables: Any) -> str:
    return " x ".join(dict.fromkeys(str(v.aval.dtype) for v in variables))


def _level(precision: Any, wide: int) -> int:
    """Returns the precision of a product as a value of `LEVELS`."""
    if precision is None:
        return 0
    if isinstance(precision, DotAlgorithmPreset):
        operand, *_, sums = (OPERANDS.get(x, 0) for x in precision.name.split("_"))
        return 2 if operand >= wide and sums >= max(wide, 32) else 0
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    return min(LEVELS[Precision(p).name.lower()] for p in pair)


def _precision_text(precision: Any) -> str:
    if precision is None:
        return "with no precision set"
    if isinstance(precision, DotAlgorithmPreset):
        return f"by the algorithm {precision.name}"
    pair = precision if isinstance(precision, tuple) else (precision,)
    return f"at precision {' x '.join(dict.fromkeys(Precision(p).name.lower() for p in pair))}"


@dataclass(frozen=True)
class Place:
    """Source of an equation: the user's line, and the library line inside it."""

    file: str = ""
    line: int = 0
    function: str = ""
    inside: str = ""
    backward: bool = False

    def finding(self, what: str, backward: bool = False) -> Finding:
        what = f"{what}, inside {self.inside}" if self.inside else what
        what = f"{what}, in its backward pass" if backward else what
        return Finding(what, self.file, self.line, self.function)


def _equations(jaxpr: Any, outer: Place) -> Iterator[tuple[Any, Place]]:
    """Yields every equation with its place, including those of nested jaxprs."""
    for eqn in jaxpr.eqns:
        # Equations of a backward pass have the source line of the forward call.
        backward = outer.backward or "transpose(" in str(eqn.source_info.name_stack)
        place = replace(place_of(eqn, outer), backward=backward)
        yield eqn, place
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    yield from _equations(part, place)


def place_of(eqn: Any, outer: Place) -> Place:
    """Returns the innermost user line; for library code, the user line that called it."""
    traceback = getattr(eqn.source_info, "traceback", None)
    inside, library = "", Place()
    for frame in traceback.frames if traceback else ():
        owner = _owner(frame.file_name)
        if owner == "":
            return Place(frame.file_name, frame.line_num, _short(frame.function_name), inside)
        if owner in LIBRARIES and not inside:
            inside = f"{_after(frame.file_name, owner)}:{frame.line_num}"
            library = Place(frame.file_name, frame.line_num, _short(frame.function_name))
    if not inside:
        return outer
    return replace(outer, inside=inside) if outer.file else library


def _short(function: str) -> str:
    return function.replace("<locals>.", "")


def _after(file: str, package: str) -> str:
    """Returns a library file's path relative to the folder that contains the package."""
    return f"{package}/{file.rpartition(f'{os.sep}{package}{os.sep}')[2]}"


@cache
def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to this library nor to another."""
    return not _owner(file) and not file.startswith(str(PARITY_DIR.parent) + os.sep)


def _owner(file: str) -> str:
    """Owner of a file: one of `LIBRARIES`, "jax", "python" or "parity"; "" for user code."""
    if file.startswith(("<frozen", "<@beartype", "<string>")):
        return "python"
    # Python's own folders contain site-packages, whose files are not part of the standard library.
    for name, root in _roots():
        if file.startswith(root + os.sep) and "site-packages" not in file.removeprefix(root):
            return name
    return ""


@cache
def _roots() -> tuple[tuple[str, str], ...]:
    """Returns `(owner, folder)` pairs."""
    roots = [("parity", str(PARITY_DIR))]
    for name in ("jax", "jaxlib", *LIBRARIES):
        spec = find_spec(name)
        folders = spec.submodule_search_locations if spec else None
        roots += [("jax" if name == "jaxlib" else name, folder) for folder in folders or ()]
    paths = sysconfig.get_paths()
    return (*roots, *(("python", paths[key]) for key in ("stdlib", "platstdlib")))
