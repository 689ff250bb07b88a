"""Defines what "identical" means, and holds all numeric tolerances.

Four statements. *Exact*: bit equal, shapes and dtypes included; integers by value. *Same function*:
in float64 the norm-relative error is at most 1e-12. *Same precision*: in a narrower dtype the error
against the float64 truth is at most k times torch's own error against that truth, plus a few eps.
*No worse*: at most twice the error of another implementation in this library, plus a floor.

Fill values are compared by position, and huge values separately from all others (`groups`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from .groups import fills, groups

SAME_FUNCTION = 1e-12
FACTOR = {"float32": 2.0, "bfloat16": 3.0, "float16": 3.0}
FLOOR_EPS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
NO_WORSE = 2.0
GRADIENT_SHARE = 1e-3
# Times the largest parameter gradient; a larger input gradient is judged by itself.
HUGE_GRADIENT = 1e6
PRINTED = 0.5e-4 + 1e-6
LIKENESS = 1e-6
INF = float("inf")
NOISE = 2.0  # errors up to this multiple of torch's own rounding noise pass
BUFFER_UNITS = 32.0  # eps by which torch's rounding of a buffer may move each of its elements
SIGMAS = 6.0  # tolerated deviation of a dropout mask's keep rate, in standard deviations
CHANCE = 1e-9  # equal masks that are less likely than this count as one fixed mask
TELLS = 0.1  # values whose own torch error or rounding noise exceeds this are inconclusive

ZEROS = "both are all zeros"
EMPTY = "there are no elements"
FILLED = "every element is infinite or a fill"
ROUNDS = 0.3
ORDINARY = 128  # binary exponents up to this cannot overflow or underflow when squared in float64


@dataclass(frozen=True)
class Verdict:
    """One judgement: the error, its limit, whether it passed, and the index of the worst element.

    Attributes:
      statement: "exact", "same function", "same precision" or "no worse".
      error: norm-relative error; inf where shapes or NaN and Inf patterns differ.
      limit: the largest error that passes.
      other_error: torch's error against the float64 truth for "same precision"; for "no worse", the
        error of the other implementation.
      index: index of the element with the largest difference, or None.
      got, want: the two values at `index`.
      note: an explanation where the numbers are not enough.
      noise: torch's own rounding noise, measured like the error, where requested.
      shows: whether these values can distinguish a right port from a wrong one; if not, they do not
        count as different.
    """

    statement: str
    error: float
    limit: float
    other_error: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    note: str = ""
    noise: float | None = None
    shows: bool = True

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; False for NaN."""
        return bool(self.error <= self.limit)

    @property
    def differs(self) -> bool:
        """Whether the comparison is conclusive and failed."""
        return self.shows and not self.ok

    @property
    def by_noise(self) -> bool:
        """Whether it passes only because of torch's own rounding noise."""
        close = self.statement != "same function" or self.error <= SAME_FUNCTION
        return self.shows and self.ok and not close

    @property
    def ratio(self) -> float | None:
        """The error divided by torch's own, where both were measured."""
        return None if not self.other_error else self.error / self.other_error


def exact(got: np.ndarray, want: np.ndarray) -> Verdict:
    """Bit equality of two arrays, including shape and dtype; NaNs must have equal bits."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        note = f"{got.dtype}{list(got.shape)} is not {want.dtype}{list(want.shape)}"
        return Verdict("exact", INF, 0.0, note=note)
    bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.itemsize) for x in (got, want)]
    differs = (bits[0] != bits[1]).any(axis=1)
    if not differs.any():
        return Verdict("exact", 0.0, 0.0)
    return _at(Verdict("exact", float(differs.mean()), 0.0), got, want, differs)


def failed_fact(note: str) -> Verdict:
    """Returns the verdict for a fact that does not hold, described by `note`."""
    return Verdict("exact", INF, 0.0, note=note)


def same_values(got: np.ndarray, want: np.ndarray) -> Verdict:
    """Equality of integers and booleans by value, regardless of width; shapes must match."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or (got.dtype == bool) != (want.dtype == bool):
        return exact(got, want)
    differs = got != want
    if differs.any():
        return _at(Verdict("exact", float(differs.mean()), 0.0), got, want, differs)
    return Verdict("exact", 0.0, 0.0, note="" if got.size else EMPTY, shows=got.size > 0)


def error(got: np.ndarray, want: np.ndarray, scale: float | None = None) -> float:
    """`norm(got - want) / norm(want)`, or `/ scale`; inf if shapes or non-finite values differ."""
    got, want = real(got), real(want)
    if got.shape != want.shape or _pattern(got, want).any():
        return INF
    finite = np.isfinite(want)
    return _over(got[finite], want[finite], scale)


def same_function(
    got: np.ndarray,
    want: np.ndarray,
    scale: float | None = None,
    zero: bool = False,
    fill: bool = False,
    noisy: Sequence[np.ndarray] = (),
) -> Verdict:
    """Equality in float64 to `SAME_FUNCTION`, judged separately for each of its `groups`.

    Args:
      scale: divisor for the norm of the difference, instead of `norm(want)`; disables groups.
      zero: whether an all-zero reference is expected; otherwise it is inconclusive.
      fill: whether all fills (-inf, finfo.min, -1e9) are equivalent; otherwise -inf equals only
        itself.
      noisy: the reference computed with perturbed rounding (1 ulp per operation). `NOISE` times the
        largest change replaces a smaller limit; beyond `TELLS` a failure is inconclusive.
    """
    sides = _Sides.of(got, want, "float64", scale is None, fill)

    def judged(part: np.ndarray) -> Verdict:
        moved = (sides.error(part, scale, x) for x in map(real, noisy))
        noise = max((x for x in moved if np.isfinite(x)), default=None)
        value, limit = sides.error(part, scale), max(SAME_FUNCTION, NOISE * (noise or 0.0))
        verdict = Verdict("same function", value, limit, noise=noise)
        if value > SAME_FUNCTION and (noise or 0.0) > TELLS:
            note = f"torch's own rounding changes it by {noise:.1e}, beside which nothing shows"
            return replace(verdict, note=note, shows=False)
        return verdict

    return _worst(sides, judged, scale is not None or zero)


def same_precision(
    got: np.ndarray,
    torch_reference: np.ndarray,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
    fill: bool = False,
) -> Verdict:
    """At most `FACTOR[dtype]` times torch's own error against the float64 truth, plus a floor.

    Judged separately for each of its `groups`; inconclusive where torch's error exceeds `TELLS`.
    """
    sides = _Sides.of(got, truth, dtype, scale is None, fill)
    torch_sides = _Sides.of(torch_reference, truth, dtype, scale is None, fill)
    sound = not torch_sides.wrong.any()

    def judged(part: np.ndarray) -> Verdict:
        torch_error = torch_sides.error(part, scale) if sound else INF
        return _precise(sides.error(part, scale), torch_error, dtype)

    return _worst(sides, judged, scale is not None or zero)


def within_precision(
    got: np.ndarray,
    torch_error: float,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
) -> Verdict:
    """`same_precision` of all elements together, given torch's own error."""
    sides = _Sides.of(got, truth, dtype, False, False)

    def judged(part: np.ndarray) -> Verdict:
        return _precise(sides.error(part, scale), torch_error, dtype)

    return _worst(sides, judged, scale is not None or zero)


def no_worse(
    got: np.ndarray,
    others: np.ndarray,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
) -> Verdict:
    """At most `NO_WORSE` times the error of another implementation, plus a floor.

    The floor is that of `same_precision`. In float64 it is `SAME_FUNCTION`: with a more accurate
    truth, both implementations may have larger errors than that.
    """
    other_error = error(others, truth, scale)
    eps = float(ml_dtypes.finfo(dtype).eps)
    floor = SAME_FUNCTION if dtype == "float64" else FLOOR_EPS[dtype] * eps
    if not np.isfinite(other_error):
        note = f"the other has NaN or Inf in {dtype} where the truth has none, or the reverse"
        return Verdict("no worse", INF, 0.0, other_error=other_error, note=note)
    sides = _Sides.of(got, truth, dtype, False, False)

    def judged(part: np.ndarray) -> Verdict:
        limit = NO_WORSE * other_error + floor
        return Verdict("no worse", sides.error(part, scale), limit, other_error=other_error)

    return _worst(sides, judged, scale is not None or zero)


def real(x: np.ndarray) -> np.ndarray:
    """Converts to float64; complex values become a trailing axis (real, imaginary)."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.stack([np.real(x), np.imag(x)], axis=-1)
    return x.astype(np.float64, copy=False)


def printed(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether `got` equals a table printed to four decimals, with non-finite values in place."""
    got, want = real(got), real(want)
    if got.shape != want.shape or _pattern(got, want).any():
        return False
    finite = np.isfinite(want)
    return bool((np.abs(got[finite] - want[finite]) <= PRINTED).all())


def allclose(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether two errors are equal: a hint must explain all but a fraction `LIKENESS` of one."""
    return error(got, want) <= LIKENESS


def of_one_size(gradients: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the gradients whose errors are measured relative to all of them together.

    These are the parameters' gradients, and input gradients ("input x") of at most `HUGE_GRADIENT`
    times the largest of them. A mask multiplied by finfo.min, for example, has a gradient of 1e300,
    which would dominate. Without parameters: all except those huge relative to the rest.
    """
    sizes = {name: whole_gradient([x]) for name, x in gradients.items()}
    params = [name for name in sizes if not name.startswith("input ")]
    most = HUGE_GRADIENT * max((sizes[name] for name in params), default=0.0)
    if most:
        return [name for name, size in sizes.items() if size <= most]
    return [
        x for x, part in zip(sizes, groups(np.asarray([*sizes.values()])), strict=True) if not part
    ]


def gradient_floor(gradients: list[np.ndarray]) -> float:
    """`1e-3 * norm(all g)`: the minimum scale for the error of one gradient."""
    return GRADIENT_SHARE * whole_gradient(gradients)


def gradient_scale(gradients: list[np.ndarray], gradient: np.ndarray) -> float:
    """`max(norm(g), 1e-3 * norm(all g))`: the scale for the error of one gradient.

    Only finite elements count, here and below: relative to Inf, any error would pass.
    """
    return max(whole_gradient([gradient]), gradient_floor(gradients))


def whole_gradient(gradients: list[np.ndarray]) -> float:
    """`norm(all g)`: the scale for gradients in narrow dtypes.

    A single gradient, such as the key bias's, may consist of rounding errors only.
    """
    finite = [x[np.isfinite(x)] for x in map(real, gradients)]
    power = _power(*finite) if finite else 0
    norms = [np.linalg.norm(_scaled(x, power)) for x in finite]
    return float(np.ldexp(np.linalg.norm(norms), -power))


@dataclass(frozen=True)
class _Sides:
    """Two arrays as float64, and which of their elements are compared.

    Attributes:
      lined_up: whether the shapes agree.
      wrong: where only one side has NaN, Inf or a fill.
      part: group of each element, -1 where it is not compared.
    """

    got: np.ndarray
    want: np.ndarray
    lined_up: bool
    wrong: np.ndarray
    part: np.ndarray

    @classmethod
    def of(cls, got: np.ndarray, want: np.ndarray, dtype: str, split: bool, fill: bool) -> "_Sides":
        """`split`: into groups, or all elements together; `fill`: as for `same_function`."""
        got, want = real(got), real(want)
        if got.shape != want.shape:
            return cls(got, want, False, np.zeros(()), np.zeros((), int))
        if not split:
            part = np.isfinite(want).astype(np.int8) - np.int8(1)
            return cls(got, want, True, _pattern(got, want), part)
        filled = fills(want, dtype)
        hidden = (filled < 0) & fill
        wrong = (fills(got, dtype) != filled) | (_pattern(got, want) & ~hidden)
        left = np.isfinite(want) & (filled == 0)
        part = np.full(want.shape, -1, np.int8)
        part[left] = groups(want[left], got[left])
        return cls(got, want, True, wrong, part)

    def error(self, part: Any, scale: float | None, other: np.ndarray | None = None) -> float:
        """Error of the elements where `part` is true; of `other` instead of `got`, if given."""
        if not self.lined_up:
            return INF
        some = part if not np.all(part) else ...  # `...` avoids copying a large array
        return _over((self.got if other is None else other)[some], self.want[some], scale)


def _worst(sides: _Sides, judged: Callable[[np.ndarray], Verdict], zero: bool) -> Verdict:
    """The verdict on the worst group, with its worst element; inconclusive ones are marked."""
    parts = [sides.part == i for i in range(sides.part.max(initial=0) + 1)]
    verdicts = [judged(part) for part in parts]
    at = max(range(len(parts)), key=lambda i: _excess(verdicts[i]))
    verdict, part = verdicts[at], parts[at]
    if not sides.lined_up:
        note = f"shape {sides.got.shape} is not {sides.want.shape}"
        return replace(verdict, note=note, shows=True)
    if not verdict.shows:
        return verdict
    if sides.wrong.any():
        wrong = replace(verdict, error=INF, note=_one_sided(sides))
        return _at(wrong, sides.got, sides.want, sides.wrong)
    empty = _shows_nothing(sides, zero)
    if empty:
        return replace(verdict, error=INF if empty == ZEROS else 0.0, note=empty, shows=False)
    if verdict.ok:
        return verdict
    if not zero and not sides.want[part].any():
        return replace(verdict, note="the reference is all zeros")
    gap = np.zeros(part.shape)
    gap[part] = np.abs(sides.got[part] - sides.want[part])
    if len(parts) > 1:
        verdict = replace(verdict, note=_beside(sides, part))
    return _at(verdict, sides.got, sides.want, gap)


def _excess(verdict: Verdict) -> float:
    return verdict.error / verdict.limit if verdict.shows else -1.0


def _one_sided(sides: _Sides) -> str:
    finite = np.isfinite(sides.got) == np.isfinite(sides.want)
    return "NaN or Inf on one side only" if not finite.all() else "a fill on one side only"


def _shows_nothing(sides: _Sides, zero: bool) -> str:
    """Why two agreeing arrays are inconclusive, or ""."""
    left = sides.part >= 0
    if not sides.want.size:
        return EMPTY
    if not left.any():
        return FILLED
    zeros = not sides.want.any() and not sides.got.any()
    return ZEROS if zeros and not zero else ""


def _beside(sides: _Sides, part: np.ndarray) -> str:
    largest = np.abs(sides.want[sides.part >= 0]).max()
    return f"among {int(part.sum())} numbers judged apart from others of up to {largest:.0e}"


def _precise(error: float, torch_error: float, dtype: str) -> Verdict:
    """Judges `error` relative to torch's own error."""
    if not np.isfinite(torch_error):
        note = f"torch itself has other NaN or Inf in {dtype} than in float64"
        return Verdict("same precision", INF, 0.0, other_error=torch_error, note=note, shows=False)
    limit = FACTOR[dtype] * torch_error + FLOOR_EPS[dtype] * float(ml_dtypes.finfo(dtype).eps)
    note = f"torch's own error in {dtype} is {torch_error:.1e}, beside which nothing shows"
    much = torch_error > TELLS
    note = note if much else ""
    return Verdict("same precision", error, limit, torch_error, note=note, shows=not much)


def _over(got: np.ndarray, want: np.ndarray, scale: float | None) -> float:
    power = _power(got, want)
    got, want = (_scaled(x, power) for x in (got, want))
    gap = float(np.linalg.norm(got - want))
    size = float(np.linalg.norm(want) if scale is None else np.ldexp(scale, power))
    return gap / size if size else (0.0 if gap == 0 else INF)


def _power(*arrays: np.ndarray) -> int:
    """Power of two that scales the largest element below one, exactly and without lost squares.

    0 where no square would be lost anyway, so that a large array is not copied.
    """
    power = -int(np.frexp(max(np.abs(x).max(initial=0.0) for x in arrays))[1])
    return power if abs(power) > ORDINARY else 0


def _scaled(x: np.ndarray, power: int) -> np.ndarray:
    return np.ldexp(x, power) if power else x


def _pattern(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where only one side has NaN, Inf or -Inf."""
    if np.isfinite(got).all() and np.isfinite(want).all():
        return np.zeros(got.shape, bool)
    kinds = ((np.isnan(x), np.isposinf(x), np.isneginf(x)) for x in (got, want))
    return np.logical_or.reduce([a != b for a, b in zip(*kinds, strict=True)])


def _at(verdict: Verdict, got: np.ndarray, want: np.ndarray, badness: np.ndarray) -> Verdict:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(badness)), got.shape))
    return replace(verdict, index=index, got=float(got[index]), want=float(want[index]))
