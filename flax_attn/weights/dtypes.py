"""Supported checkpoint dtypes, and which of them represent each other's values."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Safetensors' names. Dtypes with less than one byte per element are not supported.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 20  # elements checked at a time, so that no second array of a tensor's size is made


def holds(wide: Any, narrow: Any) -> bool:
    """Whether `wide` represents every value of `narrow` exactly.

    >>> holds(np.float32, ml_dtypes.bfloat16), holds(np.float16, ml_dtypes.bfloat16)
    (True, False)
    """
    if (
        wide == narrow
        or not jnp.issubdtype(wide, jnp.floating)
        or not jnp.issubdtype(narrow, jnp.floating)
    ):
        return bool(wide == narrow)
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp


def all_finite(array: np.ndarray) -> bool:
    """Whether a contiguous array contains neither NaN nor Inf; True for integers."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return True
    flat = array.reshape(-1)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of a signalling NaN
        return all(np.isfinite(flat[i : i + _CHUNK]).all() for i in range(0, flat.size, _CHUNK))


def overflows(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cast turned a finite value into NaN or Inf."""
    return bool((np.isfinite(before) & ~np.isfinite(after)).any())
