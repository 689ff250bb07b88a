"""Faults that any value may have: order of axes or elements, sign, factor, dtype."""

import ml_dtypes
import numpy as np

from .evidence import Evidence, Guesses, is_short, times
from .explains import differing
from .masks import only_fully_masked

NARROW = (np.dtype(ml_dtypes.bfloat16), np.dtype("float16"), np.dtype("float32"))
NOTHING = "zeros: the value is never computed"
# Keep rates are recorded in float32.
SINGLE = 4 * float(np.finfo(np.float32).eps)


def anything(evidence: Evidence) -> Guesses:
    """Guesses that only need torch's value."""
    want = evidence.plain
    yield from _rates(evidence)
    yield from _other_rates(evidence)
    yield "the other sign", -want
    for axis in range(want.ndim):
        if want.shape[axis] > 1:
            yield f"axis {axis} reversed", np.flip(want, axis)
            yield f"axis {axis} shifted by one", np.roll(want, 1, axis)
            yield f"axis {axis} shifted back by one", np.roll(want, -1, axis)
    for first in range(want.ndim):
        for second in range(first + 1, want.ndim):
            if want.shape[first] == want.shape[second] > 1:
                yield f"axes {first} and {second} swapped", np.swapaxes(want, first, second)
    yield from _factor(evidence)


def _other_rates(evidence: Evidence) -> Guesses:
    """Dropout scaled by another keep rate than torch's, to float32 precision."""
    factor = _median_ratio(evidence)
    for flax, torch in dict.fromkeys(evidence.keep_rates):
        flax_rate, torch_rate = f"{1 - flax:.4g}", f"{1 - torch:.4g}"
        if flax_rate != torch_rate and abs(factor * flax - torch) <= SINGLE * torch:
            yield f"another dropout rate: {flax_rate}, torch {torch_rate}", evidence.plain * factor


def _rates(evidence: Evidence) -> Guesses:
    """Dropout scaled by the drop rate, or not at all."""
    if not evidence.truth.keeps:
        return
    facts = (fact for call in evidence.truth.calls.values() for fact in call.facts.items())
    rates = {value for name, value in facts if name == "p" or "drop" in name}
    factor = _median_ratio(evidence)
    keep_rates = [float(np.mean(keep)) for keep in evidence.truth.keeps]
    sizes = [keep.size for keep in evidence.truth.keeps]
    for candidate in (1 - factor, 1 / (1 + factor)) if factor > 0 else ():
        sigmas = [
            (candidate * (1 - candidate) / size) ** 0.5 for size in sizes if 0 < candidate < 1
        ]
        close_rates = (
            abs(1 - candidate - x) < 6 * sigma for x, sigma in zip(keep_rates, sigmas, strict=False)
        )
        rates |= {float(f"{candidate:.4g}")} if any(close_rates) else set()
    for rate in sorted(rate for rate in rates if 0 < rate < 1):
        what = f"dropout's keep rate inverted: scaled by its rate, {rate:.6g}, not by"
        yield f"{what} {1 - rate:.6g}, which it keeps", evidence.plain * (1 - rate) / rate
        yield "what dropout keeps not scaled up", evidence.plain * (1 - rate)


def _median_ratio(evidence: Evidence) -> float:
    """Median of Flax's value divided by torch's; 0 if too few elements differ."""
    finite = np.isfinite(evidence.want) & (evidence.want != 0) & np.isfinite(evidence.got)
    differs = finite & (evidence.got != evidence.want)
    if differs.sum() < 3:
        return 0.0
    return float(np.median(evidence.got[differs] / evidence.want[differs]))


def _factor(evidence: Evidence) -> Guesses:
    """A constant factor or offset for all differing elements."""
    finite = np.isfinite(evidence.want) & (evidence.want != 0) & np.isfinite(evidence.got)
    differs = finite & (evidence.got != evidence.want)
    if differs.sum() < 3 or only_fully_masked(evidence, differing(evidence.got, evidence.want)):
        return
    ratios = evidence.got[differs] / evidence.want[differs]
    factor = float(np.median(ratios))
    if factor and np.isfinite(factor) and is_short(factor):  # zeros are no scale
        yield f"another scale: {times(factor)} times torch's", evidence.plain * factor
    more = float(np.median((evidence.got - evidence.want)[differs]))
    yield f"a constant added, {more:.6g}", evidence.plain + more


def narrow(evidence: Evidence) -> str:
    """Hint that float64 values were computed in a narrower dtype, or ""."""
    differs = differing(evidence.got, evidence.want) & np.isfinite(evidence.got)
    got, want = evidence.got[differs], evidence.want[differs]
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in NARROW:
            fits = (got.astype(dtype).astype(np.float64) == got).all()
            if got.size and fits and not (want.astype(dtype).astype(np.float64) == want).all():
                return f"a value computed in {dtype.name}"
    scale = np.abs(evidence.want[np.isfinite(evidence.want)]).max(initial=0.0)
    difference = np.abs(got - want).max(initial=0.0)
    if got.size == 0 or not np.isfinite(difference) or difference == 0:
        return ""
    size = difference / scale if scale else np.inf
    eps = float(np.finfo(np.float32).eps)
    similar_size = eps / 8 < size < 4 * eps
    return "something computed in float32: the error has its size" if similar_size else ""


def zeros(evidence: Evidence) -> str:
    """Hint that the differing elements are zero in Flax, or ""."""
    differs = differing(evidence.got, evidence.want)
    if not differs.any() or evidence.got[differs].any():
        return ""
    return f"zeros in {int(differs.sum())} places"
