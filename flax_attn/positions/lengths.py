"""The length of each token's sequence, for rotary rates that depend on it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._internal.arrays import vmap_leading


def lengths_of(
    positions: Any,
    shape: tuple[int, ...],
    valid: Bool[Array, "*B T"] | None = None,
    ids: Int[Array, "*B T"] | None = None,
    several: bool = False,
) -> Int[Array, "*B #T"]:
    """For each token, the largest position in its row or document plus one.

    `*B 1` if each row is one document.

    Args:
      positions: integers that broadcast to `*B T`, with `several` to `A *B T`; None counts the
        tokens of each row or document.
      shape: the sizes `*B T`.
      valid: which tokens are real; padding is ignored.
      ids: the document of each token; None for one in each row.
      several: whether each token has A positions, of which the largest is used.

    >>> ids = jnp.asarray([7, 7, 7, 2, 2])
    >>> lengths_of(None, (5,), ids=ids).tolist(), lengths_of(jnp.arange(5), (5,)).tolist()
    ([3, 3, 3, 2, 2], [5])
    """
    is_valid = jnp.ones(shape, bool) if valid is None else valid
    if positions is None:
        counts, join = is_valid.astype(jnp.int32), jax.ops.segment_sum
    else:
        positions = jnp.asarray(positions)
        positions = positions.max(axis=0) if several else positions
        positions = positions.reshape((1,) * (len(shape) - positions.ndim) + positions.shape)
        counts = jnp.where(is_valid, positions.astype(jnp.int32) + 1, 0)
        join = jax.ops.segment_max
    if ids is None:
        of_rows = jnp.sum if positions is None else jnp.max
        return jnp.maximum(of_rows(counts, axis=-1, keepdims=True, initial=0), 1)  # *B 1
    ids = ids + jnp.zeros_like(counts, ids.dtype)  # equal shardings on Explicit mesh axes
    counts = counts + jnp.zeros_like(ids, counts.dtype)

    def of_row(counts: Array, ids: Array) -> Array:
        order = jnp.argsort(ids)
        starts = jnp.diff(ids[order], prepend=ids[order][:1]) != 0
        numbers = jnp.cumsum(starts, dtype=order.dtype)
        document = jnp.zeros_like(order).at[order].set(numbers)
        return join(counts, document, num_segments=len(ids))[document]

    return jnp.maximum(vmap_leading(of_row, len(shape) - 1)(counts, ids), 1)
