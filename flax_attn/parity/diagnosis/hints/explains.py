"""Checks whether a guess explains a difference: everywhere, where it occurs, or in part."""

from collections.abc import Callable

import numpy as np

from ... import judge
from ...groups import groups
from .evidence import Evidence, Guess, is_short

FEW = 3
# Maximum share of an error that may stay unexplained where rounding limits accuracy, and minimum
# share of the differing elements for which a guess must be known.
REMAINDER, MIN_SHARE = 1e-3, 0.5
# Maximum number of Newton steps, and maximum relative error after the first.
NEWTON, MAX_NONLINEARITY = 8, 0.5


def throughout(evidence: Evidence, guess: Guess) -> bool:
    """Whether Flax's value equals the guess everywhere."""
    value = _lay_out(evidence, guess)(1.0)
    return value is not None and _explains(evidence, value, np.ones(evidence.got.shape, bool))


def where_it_differs(evidence: Evidence, guess: Guess) -> bool:
    """Whether Flax's value equals the guess wherever it differs from torch's.

    At least `MIN_SHARE` of the elements that the guess changes must actually differ.
    """
    value = _lay_out(evidence, guess)(1.0)
    differs = differing(evidence.got, evidence.want)
    if value is None or not _explains(evidence, value, differs):
        return False
    return differs.sum() >= MIN_SHARE * (differing(value, evidence.want) & np.isfinite(value)).sum()


def _explains(evidence: Evidence, value: np.ndarray, places: np.ndarray) -> bool:
    """Whether Flax's value equals `value` at these places, and its error is explained by it.

    Huge and ordinary values are judged separately, as in the judge.
    """
    if value.shape != evidence.got.shape:
        return False
    known = _known(evidence, value)
    if known is None:
        return False
    places = places & known
    got, want, made = evidence.got[places], evidence.want[places], value[places]
    if not judge.error(made, got) <= judge.SAME_FUNCTION:
        return False
    return judge.same_function(made, got, zero=True).ok and _accounts(made, got, want)


def _known(evidence: Evidence, value: np.ndarray) -> np.ndarray | None:
    """Where a guess is known; None if it is unknown for too many of the differing elements."""
    if not evidence.masked:
        return np.ones(value.shape, bool)
    known = np.isfinite(value) | ~np.isfinite(evidence.got)
    differs = differing(evidence.got, evidence.want)
    return known if known[differs].mean() >= MIN_SHARE else None


def _accounts(made: np.ndarray, got: np.ndarray, want: np.ndarray) -> bool:
    """Whether a guess reproduces the error of ordinary-sized values, not only their size.

    True if these values have no error, or if NaN and Inf differ: then `judge`'s verdict suffices.
    """
    if any((one(got) != one(want)).any() for one in (np.isfinite, np.isnan)):
        return True
    comparable = np.isfinite(got) & np.isfinite(want) & np.isfinite(made)
    made, got, want = (judge.real(x[comparable]) for x in (made, got, want))
    ordinary = groups(got) == 0
    gap, differs = (np.linalg.norm((x - got)[ordinary]) for x in (made, want))
    rounding = judge.SAME_FUNCTION * np.linalg.norm(got[ordinary])
    return bool(
        gap <= max(judge.LIKENESS * differs, min(rounding, REMAINDER * differs)) or not differs
    )


def partly(evidence: Evidence, guess: Guess) -> float | None:
    """The share of the fault in Flax's value that explains the whole difference, or None."""
    in_flax_layout = _lay_out(evidence, guess)
    start = in_flax_layout(0.0)
    if start is None or start.shape != evidence.got.shape:
        return None
    known, differs = _known(evidence, start), differing(evidence.got, evidence.want)
    finite = np.isfinite(evidence.got) & np.isfinite(evidence.want) & np.isfinite(start)
    if known is None or (differs & known & ~finite).any() or (differs & finite).sum() < FEW:
        return None
    comparable = differs & finite
    delta = (evidence.got - evidence.want)[comparable]
    share = 0.0
    for step in (1e-3, *(1e-5,) * (NEWTON - 1)):
        here, ahead = in_flax_layout(share), in_flax_layout(share + step)
        if here is None or ahead is None:
            return None
        slope = (ahead - here)[comparable] / step
        size = float(np.vdot(slope, slope))
        if not np.isfinite(size) or size == 0:
            return None
        gap = delta - (here - start)[comparable]
        if (
            step < 1e-3
            and judge.error(here[comparable] - start[comparable], delta) > MAX_NONLINEARITY
        ):
            return None
        change = float(np.vdot(slope, gap)) / size
        share += change
        if abs(change) <= judge.SAME_FUNCTION * abs(share):
            break
    end = in_flax_layout(share)
    if end is None or not 0 < abs(share) < 1 or (share < 0 and not callable(guess[0])):
        return None  # a negative share of a fault is not meaningful
    if not judge.allclose((end - start)[comparable], delta):
        return None
    noise = judge.SAME_FUNCTION * np.linalg.norm(evidence.want[comparable])
    return share if is_short(share, float(noise / np.linalg.norm(delta))) else None


def differing(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two arrays differ by more than rounding."""
    finite = np.isfinite(want)
    scale = np.sqrt(np.mean(np.square(want[finite]))) if finite.any() else 1.0
    with np.errstate(invalid="ignore"):
        too_far = np.abs(got - want) > judge.SAME_FUNCTION * scale
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    return ~same & (too_far | ~np.isfinite(got) | ~finite)


def _lay_out(evidence: Evidence, guess: Guess) -> Callable[[float], np.ndarray | None]:
    """The guess as a function of its share, in Flax's layout; None where it does not fit."""
    _, value = guess

    def family(share: float) -> np.ndarray | None:
        if callable(value):
            array = value(share)
            if array is None:
                return None
        else:
            if value.shape != evidence.plain.shape:
                return None
            array = value if share == 1.0 else evidence.plain + share * (value - evidence.plain)
        try:
            return evidence.layout.value(array)
        except ValueError:
            return None

    return family


def in_torch_layout(evidence: Evidence) -> np.ndarray:
    """Flax's value in torch's layout; NaN where torch repeats an element that Flax has once."""
    places = np.arange(evidence.plain.size).reshape(evidence.plain.shape)
    back = np.full(evidence.plain.size, np.nan)
    try:
        at = evidence.layout.value(places)
    except ValueError:
        return back
    laid_out = evidence.layout.value(evidence.plain)
    size = float(np.vdot(laid_out, laid_out))
    factor = float(np.vdot(laid_out, evidence.want)) / size if size else 1.0
    if at.shape == evidence.got.shape and factor:
        back[at] = evidence.got / factor
    return back
