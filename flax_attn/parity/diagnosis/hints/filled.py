"""Values in which some places only hide: by -inf, finfo.min or -1e9, which are no results."""

from dataclasses import replace

import numpy as np

from ...groups import fills
from ...sides.match import Layout
from .evidence import Evidence

# Points whose places are hidden on purpose have hints of their own.
POINTS = ("scores", "weights")


def other_fills(evidence: Evidence) -> str:
    """That one side hides what the other shows, or ""."""
    if evidence.point in POINTS or evidence.got.shape != evidence.want.shape:
        return ""
    ours, theirs = (fills(x, "float64") != 0 for x in (evidence.got, evidence.want))
    told = []
    sides = ("torch", "Flax", theirs & ~ours), ("Flax", "torch", ours & ~theirs)
    for one, other, places in sides:
        if places.any():
            first = [int(i) for i in np.argwhere(places)[0]]
            more = int(places.sum()) - 1
            also = f" and {more} places more" if more else ""
            told.append(f"{one} hides {first}{also}, {other} does not")
    return f"another mask: {'; '.join(told)}" if told else ""


def without_fills(evidence: Evidence) -> Evidence:
    """The evidence with all places that both sides hide set to -inf, in every guess too."""
    if evidence.point in POINTS or evidence.got.shape != evidence.want.shape:
        return evidence
    places = fills(evidence.want, "float64") != 0
    if not places.any() or places.all():
        return evidence

    def hide(x: np.ndarray) -> np.ndarray:
        laid = evidence.layout.value(x)
        return np.where(places, -np.inf, laid) if laid.shape == places.shape else laid

    got, want = (np.where(places, -np.inf, x) for x in (evidence.got, evidence.want))
    return replace(evidence, got=got, want=want, layout=Layout.plain(hide))
