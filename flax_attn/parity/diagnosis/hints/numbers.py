"""What the numbers of two arrays say of how they were computed."""

import ml_dtypes
import numpy as np

from ... import judge
from ...search.target import differing

HALF = (np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))
NARROW = (*HALF, np.dtype("float32"))
# Rounding changes values by up to half an ulp; require some above MOVED of that, at least FEW.
MOVED, FEW = 0.5, 8


def times(factor: float) -> str:
    """Formats a factor; never as a plain 1.

    >>> times(1.25), times(1 - 2e-12)
    ('1.25', '1 - 2e-12')
    """
    text, more = f"{factor:.8g}", factor - 1
    return text if text != "1" else f"1 {'-' if more < 0 else '+'} {abs(more):.3g}"


def other_rounding(got: np.ndarray, want: np.ndarray) -> str:
    """Describes which of two arrays is a rounded version of the other, or ""."""
    finite = np.isfinite(got) & np.isfinite(want)
    got, want = got[finite], want[finite]
    for dtype in HALF:
        if not is_exact_in(want, dtype):
            continue
        others = [other for other in HALF if other != dtype and is_exact_in(got, other)]
        if is_exact_in(got, dtype):
            continue
        if rounds(got, want, dtype, *others):
            torch_text = f"torch rounds to {dtype.name} here"
            return (
                f"{torch_text}, Flax to {others[0].name}"
                if others
                else f"{torch_text}, Flax does not"
            )
    for dtype in HALF:
        if is_exact_in(got, dtype) and not is_exact_in(want, dtype) and rounds(want, got, dtype):
            others = [other for other in HALF if other != dtype and is_exact_in(want, other)]
            torch_dtype_text = f"to {others[0].name}" if others else "does not"
            return f"Flax rounds to {dtype.name} here, torch {torch_dtype_text}"
    return ""


def is_exact_in(x: np.ndarray, dtype: np.dtype) -> bool:
    """Whether all values are representable in a dtype; False for too few values."""
    with np.errstate(all="ignore"):
        return x.size >= FEW and bool((x.astype(dtype).astype(np.float64) == x).all())


def rounds(x: np.ndarray, made: np.ndarray, *dtypes: np.dtype) -> bool:
    """Whether `made - x` has the size of rounding errors in these dtypes, and is not smaller."""
    with np.errstate(all="ignore"):
        limit = sum(_half_unit(made, dtype) for dtype in dtypes)
        gap = np.where(
            np.abs(x - made) <= judge.SAME_FUNCTION * np.abs(x).max(initial=0.0),
            0.0,
            np.abs(x - made) / limit,
        )
    differs = gap[gap > 0]
    return differs.size >= FEW and MOVED < differs.max() <= 1 + 1e-6


def _half_unit(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Half an ulp in a dtype at each value."""
    finfo = ml_dtypes.finfo(dtype)
    size = np.maximum(np.abs(x), float(finfo.smallest_normal))
    return np.exp2(np.floor(np.log2(size))) * float(finfo.eps) / 2


def in_float32(got: np.ndarray, want: np.ndarray) -> str:
    """Hint that float64 values were computed in a narrower dtype, or ""."""
    differs = differing(got, want) & np.isfinite(got)
    scale = np.abs(want[np.isfinite(want)]).max(initial=0.0)
    got, want = got[differs], want[differs]
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype in NARROW:
            fits = (got.astype(dtype).astype(np.float64) == got).all()
            if got.size and fits and not (want.astype(dtype).astype(np.float64) == want).all():
                return f"a value computed in {dtype.name}"
    difference = np.abs(got - want).max(initial=0.0)
    if got.size == 0 or not np.isfinite(difference) or difference == 0:
        return ""
    size = difference / scale if scale else np.inf
    eps = float(np.finfo(np.float32).eps)
    similar_size = eps / 8 < size < 4 * eps
    return "something computed in float32: the error has its size" if similar_size else ""


def zeros(got: np.ndarray, want: np.ndarray) -> str:
    """Hint that the differing elements are zero in Flax, or ""."""
    differs = differing(got, want)
    if not differs.any() or got[differs].any():
        return ""
    return f"zeros in {int(differs.sum())} places"
