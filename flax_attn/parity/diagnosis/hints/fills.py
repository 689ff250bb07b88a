"""Values in which some places only hide: by -inf, finfo.min or -1e9, which are no results.

Nor are those results to which a mask has added such a number, beside the ordinary ones.
"""

from dataclasses import replace

import numpy as np

from ...groups import fills, groups
from ...report import plural
from ...sides.match import Layout
from .evidence import Evidence
from .explains import differing
from .masks import LOW

# Points whose places are hidden on purpose have hints of their own.
POINTS = ("scores", "weights")
# How many times as large as all others a number is to which a mask has added one.
HUGE_FACTOR = 100


def other_fills(evidence: Evidence) -> str:
    """That one side hides what the other shows, or ""."""
    if evidence.point in POINTS or evidence.got.shape != evidence.want.shape:
        return ""
    in_flax, in_torch = (fills(x, "float64") != 0 for x in (evidence.got, evidence.want))
    parts = []
    sides = ("torch", "Flax", in_torch & ~in_flax), ("Flax", "torch", in_flax & ~in_torch)
    for one, other, places in sides:
        if places.any():
            first = [int(i) for i in np.argwhere(places)[0]]
            more = int(places.sum()) - 1
            also = f" and {plural(more, 'place')} more" if more else ""
            parts.append(f"{one} hides {first}{also}, {other} does not")
    return f"another mask: {'; '.join(parts)}" if parts else ""


def without_fills(evidence: Evidence) -> Evidence:
    """The evidence with all places that both sides hide set to -inf, in every guess too.

    Where a guess has such a number in another place, nobody knows what it would be there: NaN.
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
    """Where numbers hide, or are huge beside the ordinary ones, as a mask that is added makes them.

    >>> large(np.asarray([-np.inf, 3.0, -1e6 + 3, -1e4])).tolist()
    [True, False, True, True]
    """
    x = np.asarray(x)
    places = np.asarray(fills(x, "float64") != 0)  # of a single number a scalar else
    left = np.isfinite(x) & ~places
    places[left] = groups(x[left]) > 0
    low = left & ~places & (x < LOW)
    rest = np.abs(x[left & ~places & ~low])
    if low.any() and rest.size and np.abs(x[low]).min() > HUGE_FACTOR * rest.max():
        places |= low
    return places
