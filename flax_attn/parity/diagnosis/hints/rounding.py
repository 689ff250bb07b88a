"""Rounding to 16 bits that only one side does, or that uses another dtype."""

import ml_dtypes
import numpy as np

from ... import judge
from .chain import is_mask, product, replay, steps_of
from .evidence import Evidence
from .explains import in_torch_layout

HALF = (np.dtype(ml_dtypes.bfloat16), np.dtype("float16"))
# Rounding changes values by up to half an ulp; require some above MOVED of that, at least FEW.
MOVED, FEW = 0.5, 8


def other_rounding(evidence: Evidence) -> str:
    """Hint that the two sides round to 16 bits differently, or ""."""
    if evidence.point == "scores" and (hint := _of_a_bias(evidence)):
        return hint
    return _rounding_hint(evidence.got, evidence.want)


def _rounding_hint(got: np.ndarray, want: np.ndarray) -> str:
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


def _of_a_bias(evidence: Evidence) -> str:
    """Hint that the bias of the scores is rounded differently, or ""."""
    query, key = evidence.call.inputs.get("query"), evidence.call.inputs.get("key")
    if query is None or key is None:
        return ""
    raw, flax = product(query, key), in_torch_layout(evidence)
    steps = steps_of(evidence, raw)
    for i, step in enumerate(steps):
        bias = next((x for x in step.others if isinstance(x, np.ndarray)), None)
        if step.name != "add" or bias is None or is_mask(step):
            continue
        rest = replay([s for s in (*steps[:i], *steps[i + 1 :]) if not is_mask(s)], raw)
        added = flax.reshape(step.shape) - rest.reshape(step.shape)
        finite = np.isfinite(added)
        if hint := _rounding_hint(added[finite], np.broadcast_to(bias, step.shape)[finite]):
            return f"the score's bias: {hint}"
    return ""
