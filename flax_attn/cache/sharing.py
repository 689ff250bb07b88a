"""Pages that several rows name: which of their slots are held, and what may be written there.

A row holds a slot of a page if its table names the page and its length reaches beyond the slot. A
held slot does not change: writing there the token that it has is no change.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .rows import counted


def reaches(length: Int[Array, "*B"], pages: int, page: int) -> Int[Array, "*B pages"]:
    """How many slots of each page of its table a row of this length holds, from the first on.

    >>> reaches(jnp.asarray([5, 0]), 3, 4).tolist()
    [[4, 1, 0], [0, 0, 0]]
    """
    return jnp.clip(length[..., None] - counted(pages, length.ndim) * page, 0, page)


def occupancy_of(
    table: Int[Array, "*B pages"], length: Int[Array, "*B"], page: int, count: int
) -> Int[Array, " P"]:
    """How many slots of each of `count` pages are held, from its first on.

    >>> occupancy_of(jnp.asarray([[2, 0], [2, -1]]), jnp.asarray([5, 3]), 4, 3).tolist()
    [1, 0, 4]
    """
    pages = jnp.where(table < 0, count, table)  # past the end, where a write is dropped
    reach = reaches(length, table.shape[-1], page)
    return jnp.zeros(count, jnp.int32).at[pages].max(reach, mode="drop")


def tokens_to_write(
    pools: Any,
    tokens: Any,
    pages: Int[Array, "*B T"],
    slots: Int[Array, "*B T"],
    occupancy: jax.Array,
) -> tuple[Bool[Array, "*B T"], Bool[Array, "*B T"]]:
    """Which tokens are written, and which would change a held slot or another row's new token.

    Where several rows write one slot in this call, the first of them does, and the others must have
    the same token.

    Args:
      pools: of keys, and of values if there are any, `P K page H`.
      tokens: what the pools would be given, `*B T K H`.
      pages, slots: where each token goes; page -1 for one that goes nowhere.
      occupancy: of the pool, from `occupancy_of`.
    """
    shape, page = pages.shape, jax.tree.leaves(pools)[0].shape[2]
    stored = jax.tree.map(lambda pool: pool[jnp.maximum(pages, 0), :, slots], pools)
    goes = pages >= 0
    is_occupied = goes & (slots < occupancy[jnp.maximum(pages, 0)])
    refused = is_occupied & ~_same(stored, tokens, len(shape))
    goes = goes & ~is_occupied & ~refused.any(axis=-1, keepdims=True)

    place = jnp.where(goes, pages * page + slots, len(occupancy) * page).reshape(-1)
    number = jnp.arange(place.size, dtype=jnp.int32)
    first = (
        jnp.full(len(occupancy) * page, place.size, jnp.int32).at[place].min(number, mode="drop")
    )
    first = first.at[place].get(mode="fill", fill_value=0)  # of each token, who writes its slot
    earlier = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) :])[first], tokens)
    earlier = jax.tree.map(lambda x, like: x.reshape(like.shape), earlier, tokens)
    is_late = goes & (first != number).reshape(shape)
    return goes & ~is_late, refused | (is_late & ~_same(earlier, tokens, len(shape)))


def pages_to_copy(
    pools: Any, source: Int[Array, "*B pages"], target: Int[Array, "*B pages"], reach: jax.Array
) -> tuple[Bool[Array, "*B pages"], Bool[Array, "*B pages"]]:
    """Which pages are copied, and which would be unlike what another row has in that page.

    Args:
      pools: of keys, and of values if there are any, `P K page H`.
      source, target: the page that is copied, and where to.
      reach: how many of its slots are held afterwards.
    """
    shape, count = target.shape, jax.tree.leaves(pools)[0].shape[0]
    needed = (reach > 0) & (target >= 0)
    number = jnp.arange(target.size, dtype=jnp.int32).reshape(shape)
    goes = jnp.where(needed, target, count)
    # The row that holds most of a page copies it; of several, the last.
    order = reach * target.size + number
    most = jnp.zeros(count, jnp.int32).at[goes].max(order, mode="drop")
    owner = most.at[goes].get(mode="fill", fill_value=0) % target.size

    def same(pool: jax.Array) -> jax.Array:
        mine, other = pool[source], pool[source.reshape(-1)[owner]]  # *B pages K page H
        but_slots = (len(shape), *range(len(shape) + 2, mine.ndim))
        beyond = counted(pool.shape[2], len(shape)) >= reach[..., None]
        return (_equal(mine, other).all(axis=but_slots) | beyond).all(axis=-1)

    are_equal = jax.tree.reduce(jnp.logical_and, jax.tree.map(same, pools))
    return needed & (owner == number) & (source != target), needed & ~are_equal


def _same(a: Any, b: Any, axes: int) -> jax.Array:
    """Whether each token of b, cast to what a has, is that of a; `axes` come before its heads."""

    def same(x: jax.Array, y: jax.Array) -> jax.Array:
        return _equal(x, y.astype(x.dtype)).all(axis=tuple(range(axes, x.ndim)))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(same, a, b))


def _equal(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether both are the same number, or both are none."""
    return (x == y) | ((x != x) & (y != y))
