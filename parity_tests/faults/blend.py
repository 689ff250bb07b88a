"""A fault at low amplitude: between the right value and the wrong one, nearly the right one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOW = 1e-4


def mix(right: Callable[[], Any], wrong: Callable[[], Any]) -> Any:
    """A 1e-4 of the way from right to wrong; what is not finite or no float is wrong at once."""
    return jax.tree.map(_mix, right(), wrong())


def row(right: Callable[[], Any], wrong: Callable[[], Any]) -> Any:
    """`right`, and `wrong` in the first row where they differ."""
    return jax.tree.map(_row, right(), wrong())


def one(right: Callable[[], Any], wrong: Callable[[], Any]) -> Any:
    """`right`, and `wrong` in the first sequence's last row or head alone."""

    def part(a: Any, b: Any) -> Any:
        return a.at[(0, -1)[: a.ndim]].set(b[(0, -1)[: a.ndim]].astype(a.dtype))

    return jax.tree.map(part, right(), wrong())


def _mix(a: Any, b: Any) -> Any:
    if isinstance(a, float) and isinstance(b, float):
        return a + LOW * (b - a)
    a, b = jnp.asarray(a), jnp.asarray(b)
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return b
    finite = jnp.isfinite(a) & jnp.isfinite(b)
    gap = jnp.where(finite, b, 0) - jnp.where(finite, a, 0)
    return jnp.where(finite, a + LOW * gap, b).astype(a.dtype)


def _row(a: Any, b: Any) -> Any:
    a, b = jnp.broadcast_arrays(a, b)
    rows = (a != b).any(-1)
    first = (jnp.cumsum(rows.ravel()) == 1).reshape(rows.shape) & rows
    return jnp.where(first[..., None], b, a)
