"""Handles fill values (-inf, finfo.min, -1e9) in a tap, which are not results.

The same applies to values to which a mask has added such a number.
"""

from dataclasses import replace

import numpy as np

from ...groups import fills, groups
from ...report import plural
from ...sides.match import Layout
from .evidence import Evidence
from .explains import differing
from .masks import LOW

# Points that are masked on purpose have their own hints.
POINTS = ("scores", "weights")
# Minimum ratio between values to which a mask was added and all others.
HUGE_FACTOR = 100


def other_fills(evidence: Evidence) -> str:
    """Hint that one side has fill values where the other has none, or ""."""
    if evidence.point in POINTS or evidence.got.shape != evidence.want.shape:
        return ""
    in_flax, in_torch = (fills(x, "float64") != 0 for x in (evidence.got, evidence.want))
    parts = []
    sides = (
        ("torch", "Flax", evidence.want, in_torch & ~in_flax),
        ("Flax", "torch", evidence.got, in_flax & ~in_torch),
    )
    for one, other, value, places in sides:
        # A mask writes the same number everywhere; others have overflowed.
        if places.any() and len(np.unique(value[places])) == 1:
            first = [int(i) for i in np.argwhere(places)[0]]
            more = int(places.sum()) - 1
            also = f" and {plural(more, 'place')} more" if more else ""
            parts.append(f"{one} hides {first}{also}, {other} does not")
    return f"another mask: {'; '.join(parts)}" if parts else ""


def without_fills(evidence: Evidence) -> Evidence:
    """Sets all fill values that both sides share to -inf, also in every guess.

    If a guess has fill values elsewhere, its value there is unknown: NaN.
    """
    if evidence.point in POINTS or evidence.got.shape != evidence.want.shape:
        return evidence
    places, more = fills(evidence.want, "float64") != 0, large(evidence.want)
    if np.array_equal(more, large(evidence.got)):
        others = differing(evidence.got[~more], evidence.want[~more]).any()
        places = more if others else places
    if not places.any() or places.all():
        return evidence
    least = np.abs(evidence.want[places]).min() / HUGE_FACTOR**0.5

    def hide(x: np.ndarray) -> np.ndarray:
        laid_out = evidence.layout.value(x)
        if laid_out.shape != places.shape or laid_out.dtype.kind != "f":
            return laid_out
        unknown = np.abs(laid_out) >= least
        return np.where(places, -np.inf, np.where(unknown, np.nan, laid_out))

    got, want = (np.where(places, -np.inf, x) for x in (evidence.got, evidence.want))
    return replace(evidence, got=got, want=want, layout=Layout.plain(hide), masked=True)


def large(x: np.ndarray) -> np.ndarray:
    """Where values are fills, or as large as an added mask makes them.

    >>> large(np.asarray([-np.inf, 3.0, -1e6 + 3, -1e4])).tolist()
    [True, False, True, True]
    """
    x = np.asarray(x)
    places = np.asarray(fills(x, "float64") != 0)  # an array even for a scalar
    left = np.isfinite(x) & ~places
    places[left] = groups(x[left]) > 0
    low = left & ~places & (x < LOW)
    rest = np.abs(x[left & ~places & ~low])
    if low.any() and rest.size and np.abs(x[low]).min() > HUGE_FACTOR * rest.max():
        places |= low
    return places
