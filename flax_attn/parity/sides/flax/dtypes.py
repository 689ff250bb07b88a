"""Dtypes that Flax layers stored at construction, beside that of a run."""

from typing import Any

import jax.numpy as jnp
from flax import nnx


def clear_dtypes(module: nnx.Module) -> None:
    """Clears dtypes that layers stored at construction, so that the run's dtype applies."""
    for _, part in nnx.iter_modules(module):
        layer: Any = part
        if _follows(layer):
            layer.dtype = None


def pinned_dtypes(module: nnx.Module, dtype: str) -> list[str]:
    """Returns sentences about layers whose fixed dtype is not the run's."""
    kinds: dict[str, list[str]] = {}
    for path, part in nnx.iter_modules(module):
        fixed = None if _follows(part) else getattr(part, "dtype", None)
        if _is_dtype(fixed) and jnp.dtype(fixed).name != dtype:
            kinds.setdefault(jnp.dtype(fixed).name, []).append(".".join(map(str, path)))
    return [
        f"in {dtype} {', '.join(filter(None, paths)) or 'the module'} of Flax still computes in "
        f"{kind}, since its dtype is fixed: leave dtype out for one that follows its input"
        for kind, paths in kinds.items()
    ]


def _follows(part: nnx.Module) -> bool:
    """Whether a layer's dtype defaults to the dtype of its parameters."""
    return isinstance(part, nnx.Embed | nnx.SimpleCell) and part.dtype == part.param_dtype


def _is_dtype(x: Any) -> bool:
    try:
        return x is not None and jnp.issubdtype(jnp.dtype(x), jnp.inexact)
    except TypeError:
        return False
