"""Groups the elements of an array by magnitude, so that huge values do not mask small errors.

The norm of a tensor is dominated by its largest elements. Fill values (-inf, finfo.min, -1e9) are
therefore compared by position, and values much larger than the rest form separate groups. Values
are separated only upwards: values much smaller than the rest may be cancellation residue, which
differs between any two implementations.
"""

import ml_dtypes
import numpy as np

SHARE = 0.1  # of a dtype's maximum: larger values count as fills
SHARES = {"float16": 0.5}  # 0.1 of its maximum is 6,550, which logits can reach
KNOWN = (-1e9, -1e10, -1e30, *(float(ml_dtypes.finfo(d).min) for d in ("float32", "bfloat16")))
ROUNDING = 2.0**-53  # of a huge value: a sum of such values in float64 is zero or larger than this
HUGE = 1e6  # minimum size of a huge value, and minimum ratio between two groups


def fills(x: np.ndarray, dtype: str) -> np.ndarray:
    """Marks fill values: -1 for negative fills, 1 for positive fills, else 0.

    `x` is float64 with values computed in `dtype`. +Inf counts as overflow, -Inf as a fill.

    >>> fills(np.asarray([-np.inf, -1e9, -3.0, 1e308]), "float64").tolist()
    [-1, -1, 0, 1]
    """
    finfo = ml_dtypes.finfo(dtype)
    large = SHARES.get(dtype, SHARE) * float(finfo.max)
    if np.abs(x).max(initial=0.0) < min(large, -max(KNOWN) / 2):
        return np.zeros(x.shape, np.int8)  # fast path for nearly all arrays
    filled = np.abs(x) >= large
    for known in KNOWN:
        filled |= np.abs(x - known) <= float(finfo.eps) * abs(known)
    return np.where(filled & ~np.isposinf(x), np.sign(x), 0).astype(np.int8)


def groups(x: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
    """Group index of every finite element, 0 for values of ordinary size.

    Zeros are of group 0 if x has ordinary values beside the huge ones, and else of the group of
    the smallest huge ones, of which `other`, what x is compared with, may have rounding there. Not
    if it has smaller numbers than any rounding of these: then zeros are a group of their own.

    >>> groups(np.asarray([3.0, 1e-17, 2e9, 4e9, 1e30, 0.0])).tolist()
    [0, 0, 1, 1, 2, 0]
    """
    size = np.abs(x)
    large = size > HUGE
    if not large.any():
        return np.zeros(x.shape, np.int8)
    below = size[(size > 0) & ~large]  # only its maximum can precede a gap
    if other is not None and not below.size:
        residue = np.abs(other[size == 0])
        below = residue[(residue > 0) & (residue < ROUNDING * size[large].min())]
    ordered = np.sort(np.concatenate([[below.max()] if below.size else [], size[large]]))
    with np.errstate(over="ignore"):
        gaps = ordered[1:] > HUGE * ordered[:-1]
    return np.digitize(size, ordered[1:][gaps]).astype(np.int8)
