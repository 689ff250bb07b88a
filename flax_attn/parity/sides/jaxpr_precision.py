"""What a jaxpr shows of precision: narrowing casts and matrix products, by source line.

A CPU multiplies at full precision whatever is asked, so that a dropped precision cannot be seen in
its numbers; the jaxpr shows it. The bodies of `jit`, `scan`, `cond`, `remat`, custom derivatives
and so on are walked too; a custom backward pass only where the jaxpr is that of a gradient.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset, Precision

LEVELS = {
    **dict.fromkeys(("default", "bfloat16", "fastest"), 0),
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x"), 1),
    **dict.fromkeys(("highest", "float32"), 2),
}
# Between the person's code and jax: shown only where no line of the person's is in sight.
LIBRARIES = ("flax", "optax", "einops", "jaxtyping", "beartype")


@dataclass(frozen=True)
class Finding:
    """One fact about one line of source.

    Attributes:
      what: the fact, a verb first: "casts float64 to float32".
      file: the full path, "" where no line but jax's own is in sight.
      line: counted from 1.
      function: with the classes it stands in.
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
    """Every cast to a float narrower than the widest that goes in, once for each source line.

    Integers made such floats count (positions, say), and `lax.reduce_precision`; booleans do not.

    Args:
      jaxpr: of `jax.make_jaxpr(f)(x)` or `jax.jit(f).trace(x).jaxpr`.

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
    """Every product or convolution of floats at a lower precision than asked, once for each line.

    Also those whose result is narrower than what is multiplied.

    Args:
      jaxpr: traced under `jax.default_matmul_precision(requested)`.
      asked: one of jax's names.

    Raises:
      ValueError: for another name.

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
    return _unique_findings(jaxpr, lambda eqn: _low_precision(eqn, requested))


def widened(jaxpr: Any) -> list[Finding]:
    """Every product in a person's own lines of floats wider than all that goes in, by line.

    Those of libraries, this one among them, are theirs to choose.

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
    return [x for x in findings if x.file and _is_user_code(x.file)]


def _unique_findings(jaxpr: Any, describe: Callable[[Any], str]) -> list[Finding]:
    """What is told of the equations, once; of the backward pass only what is not true forward."""
    findings = {}
    for eqn, place in _equations(jaxpr, _Place()):
        what = describe(eqn)
        if what and place.finding(what) not in findings:
            findings[place.finding(what, place.backward)] = None
    return list(findings)


def _low_precision(eqn: Any, requested: str) -> str:
    """How a product falls short of the asked precision, or ""."""
    wide = max(map(_bits, eqn.invars[:2]), default=0)
    if "precision" not in eqn.params or not wide:
        return ""
    name, precision = eqn.primitive.name, eqn.params["precision"]
    if _level(precision, wide) < LEVELS[requested]:
        return f"multiplies ({name}) {_precision_text(precision)}, where {requested} is asked"
    if 0 < _bits(eqn.outvars[0]) < wide:
        return f"multiplies ({name}) {_dtypes(eqn.invars[:2])} into {_dtypes(eqn.outvars)}"
    return ""


def _narrowing(eqn: Any, run: int) -> str:
    """What an equation does to lose digits in a run that has floats of `run` bits, or ""."""
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
    """The width of a floating variable, of one component if it is complex; else 0."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return 0
    return jnp.finfo(dtype).bits


def _dtypes(variables: Any) -> str:
    return " x ".join(dict.fromkeys(str(v.aval.dtype) for v in variables))


def _level(precision: Any, wide: int) -> int:
    """How precise a product is, in the terms of `LEVELS`."""
    if precision is None:
        return 0
    if isinstance(precision, DotAlgorithmPreset):
        return 2 if precision.name == f"F{wide}_F{wide}_F{wide}" else 0
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
class _Place:
    """Where an equation was written: the person's line, and the library's that did it."""

    file: str = ""
    line: int = 0
    function: str = ""
    inside: str = ""
    backward: bool = False

    def finding(self, what: str, backward: bool = False) -> Finding:
        what = f"{what}, inside {self.inside}" if self.inside else what
        what = f"{what}, in its backward pass" if backward else what
        return Finding(what, self.file, self.line, self.function)


def _equations(jaxpr: Any, outer: _Place) -> Iterator[tuple[Any, _Place]]:
    """Every equation, bodies included, with its place."""
    for eqn in jaxpr.eqns:
        # jax gives equations of a backward pass the line of the forward call.
        backward = outer.backward or "transpose(" in str(eqn.source_info.name_stack)
        place = replace(_place(eqn, outer), backward=backward)
        yield eqn, place
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns"):
                    yield from _equations(part, place)


def _place(eqn: Any, outer: _Place) -> _Place:
    """The innermost line of the person's own; in a library's body, the line that called it."""
    traceback = getattr(eqn.source_info, "traceback", None)
    inside, library = "", _Place()
    for frame in traceback.frames if traceback else ():
        owner = _owner(frame.file_name)
        if owner == "":
            return _Place(frame.file_name, frame.line_num, _short(frame.function_name), inside)
        if owner in LIBRARIES and not inside:
            inside = f"{_after(frame.file_name, owner)}:{frame.line_num}"
            library = _Place(frame.file_name, frame.line_num, _short(frame.function_name))
    if not inside:
        return outer
    return replace(outer, inside=inside) if outer.file else library


def _short(function: str) -> str:
    return function.replace("<locals>.", "")


def _after(file: str, package: str) -> str:
    """The path of a library's file, from the package on."""
    return f"{package}/{file.rpartition(f'{os.sep}{package}{os.sep}')[2]}"


@cache
def _is_user_code(file: str) -> bool:
    """Whether a file is neither of this library nor of another."""
    library = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    return not _owner(file) and not file.startswith(library + os.sep)


def _owner(file: str) -> str:
    """Whose a file is: a library of LIBRARIES, "jax", "python" or "parity", or "", the person's."""
    if file.startswith(("<frozen", "<@beartype", "<string>")):
        return "python"
    for name, root in _roots():
        if file.startswith(root + os.sep) and "site-packages" not in file.removeprefix(root):
            return name
    return ""


@cache
def _roots() -> tuple[tuple[str, str], ...]:
    """Folders with their owners."""
    roots = [("parity", os.path.dirname(os.path.dirname(__file__)))]
    for name in ("jax", "jaxlib", *LIBRARIES):
        spec = find_spec(name)
        folders = spec.submodule_search_locations if spec else None
        roots += [("jax" if name == "jaxlib" else name, folder) for folder in folders or ()]
    paths = sysconfig.get_paths()
    return (*roots, *(("python", paths[key]) for key in ("stdlib", "platstdlib")))
