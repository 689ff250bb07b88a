"""The judge: what "identical" means, and the only numbers that say so.

Four statements. *Exact*: bit equal, shapes and dtypes included. *Same function*: in float64 the
norm-relative error is at most 1e-12. *Same precision*: in a narrower dtype the error against the
float64 truth is at most k times torch's own error against the same truth, plus a few eps. *No
worse*: the same against another way of our own, at most twice its error.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

SAME_FUNCTION = 1e-12
FACTOR = {"float32": 2.0, "bfloat16": 3.0, "float16": 3.0}
FLOOR_EPS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
NO_WORSE = 2.0
GRADIENT_SHARE = 1e-3
PRINTED = 0.5e-4 + 1e-6
LIKENESS = 1e-6
ROUNDS = 0.3


@dataclass(frozen=True)
class Verdict:
    """One judgement: the error, its limit, whether it passed, and where the worst element lies.

    Attributes:
      statement: "exact", "same function", "same precision" or "no worse".
      error: norm-relative error; inf where shapes or NaN and Inf patterns differ.
      limit: the largest error that passes.
      own: torch's own error against the float64 truth, for "same precision"; the other way's, for
        "no worse".
      index: of the element that differs most, or None.
      got, want: the two values there.
      note: a sentence where the numbers do not say it all.
    """

    statement: str
    error: float
    limit: float
    own: float | None = None
    index: tuple[int, ...] | None = None
    got: float | None = None
    want: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit; NaN never is."""
        return bool(self.error <= self.limit)

    @property
    def ratio(self) -> float | None:
        """The error over torch's own, where both were measured."""
        return None if not self.own else self.error / self.own


def exact(got: np.ndarray, want: np.ndarray) -> Verdict:
    """Bit equality of two arrays, shape and dtype included; NaN equals NaN of the same bits."""
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        note = f"{got.dtype}{list(got.shape)} is not {want.dtype}{list(want.shape)}"
        return Verdict("exact", np.inf, 0.0, note=note)
    bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, x.itemsize) for x in (got, want)]
    differs = (bits[0] != bits[1]).any(axis=1)
    if not differs.any():
        return Verdict("exact", 0.0, 0.0)
    return _at(Verdict("exact", float(differs.mean()), 0.0), got, want, differs)


def unlike(note: str) -> Verdict:
    """The verdict on a fact that does not hold, told in a sentence."""
    return Verdict("exact", np.inf, 0.0, note=note)


def error(got: np.ndarray, want: np.ndarray, scale: float | None = None) -> float:
    """`norm(got - want) / norm(want)`, or over `scale`; inf where finite values do not line up."""
    got, want = _float64(got), _float64(want)
    if got.shape != want.shape or _pattern(got, want).any():
        return np.inf
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    power = _power(got, want)
    gap = float(np.linalg.norm(np.ldexp(got, power) - np.ldexp(want, power)))
    size = float(np.linalg.norm(np.ldexp(want, power)) if scale is None else np.ldexp(scale, power))
    return gap / size if size else (0.0 if gap == 0 else np.inf)


def same_function(
    got: np.ndarray, want: np.ndarray, scale: float | None = None, zero: bool = False
) -> Verdict:
    """Equality in float64, at `SAME_FUNCTION`.

    Args:
      scale: what the difference is measured against, instead of `norm(want)`.
      zero: whether a reference that is all zeros is expected; otherwise it proves nothing.
    """
    verdict = Verdict("same function", error(got, want, scale), SAME_FUNCTION)
    return _explain(verdict, got, want, scale is not None or zero)


def same_precision(
    got: np.ndarray,
    torchs: np.ndarray,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
) -> Verdict:
    """At most `FACTOR[dtype]` times torch's own error against the float64 truth, plus a floor."""
    return within_precision(got, error(torchs, truth, scale), truth, dtype, scale, zero)


def within_precision(
    got: np.ndarray,
    own: float,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
) -> Verdict:
    """`same_precision`, with torch's own error already known."""
    limit = FACTOR[dtype] * own + FLOOR_EPS[dtype] * float(ml_dtypes.finfo(dtype).eps)
    verdict = Verdict("same precision", error(got, truth, scale), limit, own=own)
    if not np.isfinite(own):
        note = f"torch itself has other NaN or Inf in {dtype} than in float64"
        return Verdict("same precision", np.inf, 0.0, own=own, note=note)
    return _explain(verdict, got, truth, scale is not None or zero)


def no_worse(
    got: np.ndarray,
    others: np.ndarray,
    truth: np.ndarray,
    dtype: str,
    scale: float | None = None,
    zero: bool = False,
) -> Verdict:
    """At most `NO_WORSE` times the error of another way to compute the same, plus a floor.

    The floor is that of `same_precision`, and in float64, where two ways may both be off by much
    more than `SAME_FUNCTION` if the truth is known better than that, it is `SAME_FUNCTION`.
    """
    own = error(others, truth, scale)
    eps = float(ml_dtypes.finfo(dtype).eps)
    floor = SAME_FUNCTION if dtype == "float64" else FLOOR_EPS[dtype] * eps
    verdict = Verdict("no worse", error(got, truth, scale), NO_WORSE * own + floor, own=own)
    if not np.isfinite(own):
        note = f"the other has NaN or Inf in {dtype} where the truth has none, or the reverse"
        return Verdict("no worse", np.inf, 0.0, own=own, note=note)
    return _explain(verdict, got, truth, scale is not None or zero)


def printed(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether `got` is what a table printed to four decimals shows, -inf in its place."""
    got, want = _float64(got), _float64(want)
    if got.shape != want.shape or _pattern(got, want).any():
        return False
    finite = np.isfinite(want)
    return bool((np.abs(got[finite] - want[finite]) <= PRINTED).all())


def alike(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether one error is another: what a hint says must explain all but a `LIKENESS` of it."""
    return error(got, want) <= LIKENESS


def gradient_scale(gradients: list[np.ndarray], own: np.ndarray) -> float:
    """`max(norm(g), 1e-3 * norm(all g))`: what an error of one gradient is measured against.

    Only finite elements count, here and below: measured against Inf, anything would pass.
    """
    return max(whole_gradient([own]), GRADIENT_SHARE * whole_gradient(gradients))


def whole_gradient(gradients: list[np.ndarray]) -> float:
    """`norm(all g)`: what gradients are measured against in narrow dtypes, where single ones, the
    bias of keys say, may be nothing but rounding."""
    finite = (x[np.isfinite(x)] for x in map(_float64, gradients))
    return float(np.linalg.norm([np.linalg.norm(x) for x in finite]))


def _float64(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _power(*arrays: np.ndarray) -> int:
    """Of two, by which the largest element comes below one: exact, and no square is lost."""
    return -int(np.frexp(max(np.abs(x).max(initial=0.0) for x in arrays))[1])


def _pattern(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where NaN, Inf or -Inf stands on one side only."""
    kinds = ((np.isnan(x), np.isposinf(x), np.isneginf(x)) for x in (got, want))
    return np.logical_or.reduce([a != b for a, b in zip(*kinds, strict=True)])


def _explain(verdict: Verdict, got: np.ndarray, want: np.ndarray, zero: bool) -> Verdict:
    got, want = _float64(got), _float64(want)
    if got.shape != want.shape:
        return _noted(verdict, f"shape {got.shape} is not {want.shape}")
    if want.size and not zero and not want.any():
        return _noted(
            Verdict(verdict.statement, np.inf, verdict.limit), "the reference is all zeros"
        )
    if verdict.ok:
        return verdict
    pattern = _pattern(got, want)
    if pattern.any():
        verdict = _noted(verdict, "NaN or Inf on one side only")
        return _at(verdict, got, want, pattern)
    gap = np.where(np.isfinite(want), np.abs(got - np.where(np.isfinite(want), want, 0)), 0)
    return _at(verdict, got, want, gap)


def _noted(verdict: Verdict, note: str) -> Verdict:
    return Verdict(verdict.statement, verdict.error, verdict.limit, verdict.own, note=note)


def _at(verdict: Verdict, got: np.ndarray, want: np.ndarray, badness: np.ndarray) -> Verdict:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(badness)), got.shape))
    return Verdict(
        verdict.statement,
        verdict.error,
        verdict.limit,
        verdict.own,
        index,
        float(got[index]),
        float(want[index]),
        verdict.note,
    )
