"""Which elements of an array are judged together, so that huge numbers hide no small ones.

The norm of a whole tensor is that of its largest elements. So what only hides a place (a fill:
-inf, finfo.min, -1e9) is compared by place, and numbers that are huge beside all others are a group
of their own. Groups are split upwards only: small numbers beside numbers of ordinary size may be
what cancellation left of them, which nobody computes twice alike.
"""

import ml_dtypes
import numpy as np

SHARE = 0.1  # of the largest number of a dtype: beyond it, a fill
SHARES = {"float16": 0.5}  # a tenth of it is 6,550, which logits may be
KNOWN = (-1e9, -1e10, -1e30, *(float(ml_dtypes.finfo(d).min) for d in ("float32", "bfloat16")))
HUGE = 1e6  # a gap as wide begins a group of huge numbers, as large as this at least


def fills(x: np.ndarray, dtype: str) -> np.ndarray:
    """-1 where a float64 array, of numbers computed in `dtype`, has a negative fill, 1 where it has
    a positive one, else 0; Inf is a number that overflowed, -Inf a fill.

    >>> fills(np.asarray([-np.inf, -1e9, -3.0, 1e308]), "float64").tolist()
    [-1, -1, 0, 1]
    """
    finfo = ml_dtypes.finfo(dtype)
    large = SHARES.get(dtype, SHARE) * float(finfo.max)
    if np.abs(x).max(initial=0.0) < min(large, -max(KNOWN) / 2):
        return np.zeros(x.shape, np.int8)  # nearly all arrays: none is looked through seven times
    filled = np.abs(x) >= large
    for known in KNOWN:
        filled |= np.abs(x - known) <= float(finfo.eps) * abs(known)
    return np.where(filled & ~np.isposinf(x), np.sign(x), 0).astype(np.int8)


def groups(x: np.ndarray) -> np.ndarray:
    """The group of every finite element, 0 for those of ordinary size.

    >>> groups(np.asarray([3.0, 1e-17, 2e9, 4e9, 1e30, 0.0])).tolist()
    [0, 0, 1, 1, 2, 0]
    """
    size = np.abs(x)
    large = size > HUGE
    if not large.any():
        return np.zeros(x.shape, np.int8)
    below = size[(size > 0) & ~large]  # of which the largest alone may lie before a gap
    ordered = np.sort(np.concatenate([[below.max()] if below.size else [], size[large]]))
    with np.errstate(over="ignore"):
        gaps = ordered[1:] > HUGE * ordered[:-1]
    return np.digitize(size, ordered[1:][gaps]).astype(np.int8)
