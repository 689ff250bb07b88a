"""A paged cache: rows of unequal lengths share one pool of pages, assigned by a block table.

The caller allocates pages on the host: assign a page when a row needs it, and free it when the row
is done. This module allocates nothing.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_positive
from .._internal.types import frozen
from ..quantized import Float8, Int8
from .memory import Memory
from .rows import (
    batch_axes,
    check_overflow,
    check_row,
    counted,
    first_row,
    next_places,
    rows_to_reset,
    rows_to_take,
    truncated_lengths,
)
from .slots import Cache


@frozen
class PagedCache:
    """Keys and values in pages of a pool that all rows share.

    Also called: paged KV cache, PagedAttention, block table.

    Token p of a row stands in the page `table[row, p // page]`, at `p % page`. It has the methods
    of `Cache`; the table is replaced with `dataclasses.replace(cache, table=...)`.

    Attributes:
      pool_keys, pool_values: `P K page H` and `P K page h`; values None for a latent cache.
      table: `*B pages`, the page in the pool, -1 where a row has none.
      length: `*B`, the tokens stored so far.
      overflowed: `*B`, rows that were given more tokens than they have pages for.

    Raises:
      ValueError: by its methods, which say why.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.

    >>> from dataclasses import replace
    >>> from flax_attn import PagedCache, attend_cached
    >>> cache = PagedCache.empty(2, 8, 3, (5, 4), 6)  # five pages of four tokens
    >>> cache = replace(cache, table=jnp.asarray([[3, -1], [0, 2]]))
    >>> x = jnp.ones((2, 3, 3, 6))
    >>> o, cache = attend_cached(x, x, x, cache)
    >>> cache.length.tolist()
    [3, 3]
    """

    pool_keys: Any
    pool_values: Any
    table: Any
    length: Any
    overflowed: Any
    store: Int8 | Float8 | None = None

    @staticmethod
    def empty(
        batch: int | tuple[int, ...],
        length: int,
        num_kv_heads: int,
        pages: tuple[int, int],
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: Any = jnp.float32,
        store: Int8 | Float8 | None = None,
        latent: bool = False,
        layers: int | None = None,
    ) -> "PagedCache":
        """A pool of empty pages, and a table in which no row has a page.

        Args:
          batch: the batch axes `*B`; a number stands for one axis, () for none.
          length: tokens that a row can hold at most, which is the width of the table.
          num_kv_heads, head_dim, value_dim: as of `Cache.empty`.
          pages: how many pages the pool has, and how many tokens a page holds.
          dtype, store, latent, layers: as of `Cache.empty`.

        Raises:
          ValueError: for sizes below 1.
        """
        count, page = pages
        value_dim = head_dim if value_dim is None else value_dim
        check_positive(length=length, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_positive(value_dim=value_dim, pages=count, page=page)
        axes = batch_axes(batch, layers)
        front = () if layers is None else (layers,)

        def pool(width: int) -> Any:
            x = jnp.zeros((*front, count, num_kv_heads, page, width), dtype)
            return x if store is None else store.quantize(x)

        return PagedCache(
            pool_keys=pool(head_dim),
            pool_values=None if latent else pool(value_dim),
            table=jnp.full((*axes, -(-length // page)), -1, jnp.int32),
            length=jnp.zeros(axes, jnp.int32),
            overflowed=jnp.zeros(axes, bool),
            store=store,
        )

    @property
    def latent(self) -> bool:
        """Whether the values are the first columns of the keys."""
        return self.pool_values is None

    @property
    def page(self) -> int:
        """Number of tokens of a page."""
        return self.pool_keys.shape[-2]

    @property
    def slots(self) -> int:
        """Capacity of a row with all its pages, in tokens, S."""
        return self.table.shape[-1] * self.page

    @property
    def window(self) -> None:
        """None: a paged cache is not a ring."""
        return

    @property
    def by_slot(self) -> bool:
        """False: masks with an axis of S are refused, since pages decide a row's slots."""
        return False

    def next_places(self, T: int, valid: Bool[Array, "*#B T"] | None = None) -> Int[Array, "*B T"]:
        """Positions of the next T tokens, -1 for padding."""
        return next_places(self.length, T, valid)

    def holds_beside(self, T: int) -> bool:
        """True: T tokens can always be written before attending."""
        return True

    def append(
        self,
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K h"] | None,
        places: Int[Array, "*B T"],
    ) -> "PagedCache":
        """Appends T tokens at the positions that `next_places` returned.

        Raises:
          ValueError: outside jit, if a row has no page for one of them; nothing is written then.
        """
        new = jnp.maximum(self.length, jnp.max(places, axis=-1, initial=-1) + 1)
        missing_page = (places >= 0) & (self._pages_of(places) < 0)
        lacking = missing_page.any(axis=-1)
        if not isinstance(lacking, Tracer) and lacking.any():
            row = first_row(lacking)
            raise ValueError(
                f"Row {row} would need pages of {self.page} for {int(new[row])} tokens, and its "
                "table has none for some of them. Give it pages: replace(cache, table=...)."
            )
        over = self.overflowed | lacking
        places = jnp.where(over[..., None], -1, places)
        values = None if v is None else self._put(self.pool_values, v, places)
        return replace(
            self,
            pool_keys=self._put(self.pool_keys, k, places),
            pool_values=values,
            length=jnp.where(over, self.length, new),
            overflowed=over,
        )

    def _pages_of(self, places: jax.Array) -> jax.Array:
        """Pool page of each token, -1 where the row has none."""
        at = places // self.page
        inside = (places >= 0) & (at < self.table.shape[-1])
        pages = jnp.take_along_axis(self.table, jnp.where(inside, at, 0), axis=-1)
        return jnp.where(inside, pages, -1)

    def _put(self, pool: Any, x: jax.Array, places: jax.Array) -> Any:
        tokens = x if self.store is None else self.store.quantize(x)
        # All rows' tokens are written by one scatter; page `P`, past the end, drops a write.
        pages = self._pages_of(places).reshape(-1)
        pages = jnp.where(pages < 0, self.pool_keys.shape[0], pages)
        slots, axes = places.reshape(-1) % self.page, places.ndim

        def write(stored: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(-1, *new.shape[axes:]).astype(stored.dtype)
            return stored.at[pages, :, slots].set(new, mode="drop")

        return jax.tree.map(write, pool, tokens)

    def read(self) -> tuple[Any, Any, jax.Array]:
        """Keys and values `*B K S H`, gathered from their pages, and the tokens' positions."""
        axes = self.length.ndim

        def gathered(pool: jax.Array) -> jax.Array:
            x = jnp.moveaxis(pool[jnp.maximum(self.table, 0)], axes, axes + 1)  # *B K pages page
            return x.reshape(*x.shape[: axes + 1], self.slots, *x.shape[axes + 3 :])

        keys = jax.tree.map(gathered, self.pool_keys)
        values = keys if self.pool_values is None else jax.tree.map(gathered, self.pool_values)
        slot = counted(self.slots, axes)
        token_mask = (slot < self.length[..., None]) & (jnp.repeat(self.table, self.page, -1) >= 0)
        return keys, values, jnp.where(token_mask, slot, -1)

    def truncate(self, length: int | Int[Array, "*#B"]) -> "PagedCache":
        """Removes the tokens from position `length` on; pages stay in the table.

        Raises:
          ValueError: outside jit, for a length below 0. Under jit the row counts as overflowed.
        """
        length, bad = truncated_lengths(length, self.length)
        return replace(self, length=length, overflowed=self.overflowed | bad)

    def take(self, rows: Int[Array, "*B"]) -> "PagedCache":
        """Copies row `rows[i]` to row i for every i, into the pages that row i has.

        Raises:
          ValueError: outside jit, if a row lacks pages for what it would be given.
        """
        rows = rows_to_take(rows, self.length.shape[0])
        if rows.shape != self.length.shape[:1]:
            raise ValueError(
                f"take of a paged cache names a row for each of its {self.length.shape[:1]} rows, "
                f"since pages are the caller's; got shape {rows.shape}."
            )
        source_pages, table, length = self.table[rows], self.table, self.length[rows]
        first = counted(table.shape[-1], length.ndim) * self.page
        needed = first < length[..., None]
        lacking = (needed & (table < 0)).any(axis=-1)
        if not isinstance(lacking, Tracer) and lacking.any():
            raise ValueError(
                f"Row {first_row(lacking)} lacks pages for the tokens it would be given. Give it "
                "pages: replace(cache, table=...)."
            )
        # Whole pages are copied, as many as the source row needs.
        target_pages = jnp.where(needed & (table >= 0), table, self.pool_keys.shape[0])
        keys, values = (
            jax.tree.map(lambda x: x.at[target_pages].set(x[source_pages], mode="drop"), pool)
            for pool in (self.pool_keys, self.pool_values)
        )
        over = self.overflowed[rows] | lacking
        return replace(self, pool_keys=keys, pool_values=values, length=length, overflowed=over)

    def reset(self, rows: Bool[Array, "*#B"]) -> "PagedCache":
        """Empties these rows; their pages stay in the table until the caller frees them."""
        rows = rows_to_reset(rows, self.length.shape)
        return replace(
            self, length=jnp.where(rows, 0, self.length), overflowed=self.overflowed & ~rows
        )

    def insert(self, row: int | jax.Array, other: "Cache | PagedCache") -> "PagedCache":
        """Copies the tokens of `other`, a static or paged cache of one row, to a row.

        Raises:
          ValueError: if `other` is a ring or has several rows or another store; outside jit, if
            the row lacks pages.
        """
        self._check_insert(row, other)
        keys, values, positions = other.read()
        mine = replace(
            self,
            table=self.table[row][None],
            length=jnp.zeros(1, jnp.int32),
            overflowed=other.overflowed,
            store=None,  # the tokens of `other` are quantized already
        )
        new = mine.append(*_as_tokens(keys, values, self.pool_values), positions)
        return replace(
            self,
            pool_keys=new.pool_keys,
            pool_values=new.pool_values,
            length=self.length.at[row].set(new.length[0]),
            overflowed=self.overflowed.at[row].set(new.overflowed[0]),
        )

    def _check_insert(self, row: Any, other: Any) -> None:
        """Raises ValueError unless `other` is a static or paged cache of one row that fits."""
        wanted = (
            "insert into a paged cache takes a static or paged cache of one row with the same store"
        )
        if isinstance(other, Memory):
            raise ValueError(f"{wanted}; got a Memory.")
        if other.window is not None or other.length.shape != (1,) or other.store != self.store:
            raise ValueError(
                f"{wanted}, {self.store}; got rows {other.length.shape}, window={other.window}, "
                f"store={other.store}."
            )
        mine, its = _token_of(self), _token_of(other)
        if mine != its:
            raise ValueError(
                "insert takes a cache whose tokens have the heads, widths and dtypes of this one, "
                f"{mine}; got {its}."
            )
        check_row(row, self.length.shape[0])

    def check(self) -> "PagedCache":
        """Returns the cache unless a row has overflowed.

        Raises:
          ValueError: naming the rows.
        """
        check_overflow(self.overflowed, self.slots)
        return self


def _token_of(cache: Any) -> list[tuple[Any, ...]]:
    """Heads, width and dtype of one token's keys and values."""
    leaf = jax.tree.leaves(jax.eval_shape(lambda c: c.read()[:2], cache))
    return [(x.shape[1], *x.shape[3:], str(x.dtype)) for x in leaf]


def _as_tokens(keys: Any, values: Any, pool_values: Any) -> tuple[Any, Any]:
    """Keys and values `*B K S H` to `*B S K H`; no values for a latent cache."""
    keys, values = (jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), y) for y in (keys, values))
    return keys, None if pool_values is None else values
