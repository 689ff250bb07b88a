"""A paged cache: rows of unequal lengths share one pool of pages, assigned by a block table.

The caller allocates pages on the host: assign a page when a row needs it, and free it when the row
is done. This module allocates nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import reshaped
from .._internal.checks import check_positive
from .._internal.renamed import RenamedAttribute
from .._internal.types import frozen
from ..masks import Mask
from ..quantized import Float8, Int8
from ..sharding.specs import spec_of
from .memory import Memory
from .meshes import explicit_mesh, gathered, mesh_of_sharded, resharded, sharded_like
from .rows import (
    batch_axes,
    check_overflow,
    check_row,
    counted,
    first_row,
    next_positions,
    rows_to_reset,
    rows_to_take,
    truncated_lengths,
)
from .sharing import occupancy_of, pages_to_copy, reaches, tokens_to_write
from .slots import Cache

Method = TypeVar("Method", bound=Callable[..., Any])


def on_whole_rows(method: Method) -> Method:
    """A method that runs on the table, length and overflowed of all rows, on every device.

    Pages are of all rows, whichever devices these lie on. The result is sharded as the cache was.
    """

    @wraps(method)
    def run(self: "PagedCache", *args: Any, **kwargs: Any) -> "PagedCache":
        rows = gathered({name: getattr(self, name) for name in ("table", "length", "overflowed")})
        return sharded_like(method(replace(self, **rows), *args, **kwargs), self)

    return cast(Method, run)


@frozen
class PagedCache:
    """Keys and values in pages of a pool that all rows share.

    Also called: paged KV cache, PagedAttention, block table.

    Token p of a row stands in the page `table[row, p // page]`, at `p % page`. It has the methods
    of `Cache`; the table is replaced with `dataclasses.replace(cache, table=...)`.

    Rows may name the same pages. A row holds the slots of its pages up to its length, and a slot
    that another row holds never changes: a row that would change it needs a page of its own before,
    by `copy_page` or `take(rows, pages=)`. Rows that write one slot in one call write the same.

    Attributes:
      pool_keys, pool_values: `P K page H` and `P K page h`; values None for a latent cache.
      table: `*B pages`, the page in the pool, -1 where a row has none.
      length: `*B`, the tokens stored so far.
      overflowed: `*B`, rows that were given more tokens than they have pages for, or were to change
        a slot that another row holds.

    Raises:
      ValueError: by its methods, which say why.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.

    >>> from dataclasses import replace
    >>> from flax_attn import PagedCache, attend_cached
    >>> cache = PagedCache.empty(2, 8, 3, (5, 4), 6)  # five pages of four tokens
    >>> cache = replace(cache, table=jnp.asarray([[3, -1], [0, 2]]))
    >>> x = jnp.ones((2, 3, 3, 6))
    >>> o, cache = jax.jit(attend_cached)(x, x, x, cache)
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
    def pages(self) -> int:
        """Number of pages of the pool, P."""
        return self.pool_keys.shape[-4]

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

    next_places = RenamedAttribute("next_positions", goes="0.6.0")

    def next_positions(
        self, T: int, valid: Bool[Array, "*#B T"] | Mask | None = None
    ) -> Int[Array, "*B T"]:
        """Positions of the next T tokens, -1 for padding."""
        return next_positions(self.length, T, valid)

    def holds_beside(self, T: int) -> bool:
        """True: T tokens can always be written before attending."""
        return True

    @on_whole_rows
    def append(
        self,
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K h"] | None,
        positions: Int[Array, "*B T"],
    ) -> "PagedCache":
        """Appends T tokens at the positions that `next_positions` returned.

        Raises:
          ValueError: outside jit, if a row has no page for one of them, or would write over a token
            of a row that shares the page; nothing is written then.
        """
        return self._appended(k, v, positions, self)

    def _occupancy(self) -> Int[Array, " P"]:
        """How many slots of each page the rows hold, from its first on."""
        return occupancy_of(self.table, self.length, self.page, self.pages)

    def _appended(
        self, k: jax.Array, v: Any, positions: jax.Array, whole: "PagedCache", row: Any = None
    ) -> "PagedCache":
        """`append`, where `whole` has all rows of the pool, of which these may be one `row`."""
        mesh, axes = explicit_mesh((self, k, v, positions)), positions.ndim
        token, stored = jax.tree.leaves(k)[0], jax.tree.leaves(self.pool_keys)[0]
        for heads in (spec_of(token)[axes], spec_of(stored)[1]):  # rows are gathered first
            k, v = resharded((k, v), mesh, *[None] * axes, heads)
        positions = resharded(positions, mesh)
        new = jnp.maximum(self.length, jnp.max(positions, axis=-1, initial=-1) + 1)
        missing_page = (positions >= 0) & (self._pages_of(positions) < 0)
        lacking = missing_page.any(axis=-1)
        if not isinstance(lacking, Tracer) and lacking.any():
            row = first_row(lacking)
            raise ValueError(
                f"Row {row} would need pages of {self.page} for {int(new[row])} tokens, and its "
                "table has none for some of them. Give it pages: replace(cache, table=...)."
            )
        pages = jnp.where((self.overflowed | lacking)[..., None], -1, self._pages_of(positions))
        slots, pools = positions % self.page, (self.pool_keys, self.pool_values)
        tokens = (k, v) if self.store is None else jax.tree.map(self.store.quantize, (k, v))
        writes, refused = tokens_to_write(pools, tokens, pages, slots, whole._occupancy())
        whole._refuse_change(refused, pages, row)
        over = self.overflowed | lacking | refused.any(axis=-1)
        # All rows' tokens are written by one scatter; page `P`, past the end, drops a write.
        pages, slots = jnp.where(writes, pages, self.pages).reshape(-1), slots.reshape(-1)

        def write(stored: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(-1, *new.shape[positions.ndim :]).astype(stored.dtype)
            return stored.at[pages, :, slots].set(new, mode="drop")

        keys, values = jax.tree.map(write, pools, tokens)
        length = jnp.where(over, self.length, new)
        return replace(self, pool_keys=keys, pool_values=values, length=length, overflowed=over)

    def _refuse_change(self, refused: jax.Array, pages: jax.Array, row: Any = None) -> None:
        """Raises ValueError if a token is known to be `refused` in its page of the pool, `*B n`."""
        if isinstance(refused, Tracer) or not refused.any():
            return
        row = first_row(refused.any(axis=-1)) if row is None else int(row)
        page = int(np.asarray(pages)[np.asarray(refused)][0])
        named = np.argwhere((np.asarray(self.table) == page).any(axis=-1)).reshape(-1).tolist()
        raise ValueError(
            f"Row {row} would write over tokens in page {page} of the pool, which is in the tables "
            f"of rows {named}. Give row {row} a page of its own before, cache.copy_page({row}, at, "
            "page), or let rows part by take(rows, pages=)."
        )

    def _pages_of(self, positions: jax.Array) -> jax.Array:
        """Pool page of each token, -1 where the row has none."""
        at = positions // self.page
        inside = (positions >= 0) & (at < self.table.shape[-1])
        pages = jnp.take_along_axis(self.table, jnp.where(inside, at, 0), axis=-1)
        return jnp.where(inside & (pages < self.pages), pages, -1)

    def read(self) -> tuple[Any, Any, jax.Array]:
        """Keys and values `*B K S H`, gathered from their pages, and the tokens' positions."""
        axes, mesh = self.length.ndim, mesh_of_sharded(self)
        rows = spec_of(self.length)
        table = resharded(self.table, mesh, *rows)

        def of_rows(pool: jax.Array) -> jax.Array:
            spec = jax.P(*rows, None, spec_of(pool)[1])
            where = None if mesh is None else jax.NamedSharding(mesh, spec)
            x = pool.at[jnp.maximum(table, 0)].get(out_sharding=where)  # *B pages K page
            x = jnp.moveaxis(x, axes, axes + 1)  # *B K pages page
            return reshaped(x, (*x.shape[: axes + 1], self.slots, *x.shape[axes + 3 :]))

        keys = jax.tree.map(of_rows, self.pool_keys)
        values = keys if self.pool_values is None else jax.tree.map(of_rows, self.pool_values)
        slot = counted(self.slots, axes)
        token_mask = (slot < self.length[..., None]) & (jnp.repeat(table, self.page, -1) >= 0)
        return keys, values, jnp.where(token_mask, slot, -1)

    def truncate(self, length: int | Int[Array, "*#B"]) -> "PagedCache":
        """Removes the tokens from position `length` on; pages stay in the table.

        Raises:
          ValueError: outside jit, for a length below 0. Under jit the row counts as overflowed.
        """
        length, bad = truncated_lengths(length, self.length)
        after = replace(self, length=length, overflowed=self.overflowed | bad)
        return sharded_like(after, self)

    @on_whole_rows
    def take(self, rows: Int[Array, "*B"], pages: Int[Array, "*B"] | None = None) -> "PagedCache":
        """Gives row i the tokens of row `rows[i]`, for every i, such as the surviving beams.

        Without `pages` they are copied into the pages that row i has. With `pages` row i shares the
        full pages of row `rows[i]`, and the page that is not full, or the next, is `pages[i]`, into
        which its tokens are copied; -1 for a row that stays as it is. Which pages no row needs any
        more, the table says.

        Raises:
          ValueError: outside jit, if a row lacks pages for what it would be given, or another row
            holds other tokens in one of them.
        """
        rows, pages = gathered((rows_to_take(rows, self.length.shape[0]), pages))
        if rows.shape != self.length.shape[:1]:
            raise ValueError(
                f"take of a paged cache names a row for each of its {self.length.shape[:1]} rows, "
                f"since pages are the caller's; got shape {rows.shape}."
            )
        source, length = self.table[rows], self.length[rows]
        table = self.table if pages is None else self._shared(rows, source, length, pages)
        reach = reaches(length, table.shape[-1], self.page)
        lacking = ((reach > 0) & ((table < 0) | (table >= self.pages))).any(axis=-1)
        if not isinstance(lacking, Tracer) and lacking.any():
            raise ValueError(
                f"Row {first_row(lacking)} lacks pages for the tokens it would be given. Give it "
                "pages: replace(cache, table=...)."
            )
        taken = replace(
            self, table=table, length=length, overflowed=self.overflowed[rows] | lacking
        )
        return taken._with_copies(source, reach)

    def _shared(self, rows: Any, source: Any, length: Any, pages: Any) -> jax.Array:
        """The table in which rows share full pages, and have one of `pages` after them."""
        pages = jnp.asarray(pages, jnp.int32)
        if pages.shape != self.length.shape:
            raise ValueError(
                f"take(rows, pages=) names a page for each of the rows {self.length.shape}, or -1 "
                f"for one that stays; got shape {pages.shape}."
            )
        at, full = counted(source.shape[-1], length.ndim), (length // self.page)[..., None]
        shared = jnp.where(at < full, source, jnp.where(at == full, pages[..., None], -1))
        itself = (rows == counted(len(rows), 0)).reshape(-1, *[1] * (length.ndim - 1))
        is_same = (pages < 0) & itself
        return jnp.where(is_same[..., None], self.table, shared)

    def _with_copies(self, source: jax.Array, reach: jax.Array) -> "PagedCache":
        """The cache with the pages `source` copied to those of its table, as far as they reach."""
        pools = self.pool_keys, self.pool_values
        reach = jnp.where(self.overflowed[..., None], 0, reach)
        copies, refused = pages_to_copy(pools, source, self.table, reach)
        self._refuse_change(refused, self.table)
        over = self.overflowed | refused.any(axis=-1)
        copied = self._copied(source, jnp.where(copies, self.table, self.pages))
        return replace(copied, overflowed=over)

    def _copied(self, source: jax.Array, target: jax.Array) -> "PagedCache":
        """The cache with pages of its pool copied to others; none to page `P`, past the end."""
        pools = self.pool_keys, self.pool_values
        keys, values = jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), pools)
        return replace(self, pool_keys=keys, pool_values=values)

    @on_whole_rows
    def copy_page(
        self, row: int | jax.Array, at: int | jax.Array, page: int | jax.Array
    ) -> "PagedCache":
        """Copies a page of a row to another page of the pool, which takes its place in the table.

        For a row that has taken tokens back and is to write where rows that share its page hold
        others.

        Args:
          row: along the only batch axis.
          at: the page's place in the table of the row: that of token p is `p // page`.
          page: of the pool, which no row holds.

        Raises:
          ValueError: outside jit, if there is no such row or page, or a row holds it.
        """
        check_row(row, self.length.shape[0], "copy_page")
        row, at, page = (jnp.asarray(x, jnp.int32) for x in (row, at, page))
        inside = (at >= 0) & (at < self.table.shape[-1]) & (page >= 0) & (page < self.pages)
        bad = ~inside | (self._occupancy()[page] > 0) | (self.table[row, at] < 0)
        if not isinstance(bad, Tracer) and bad:
            raise ValueError(
                f"copy_page takes a page of the row, {self.table[row].tolist()}, to one of the "
                f"{self.pages} of the pool that no row holds; got at={at}, page={page}."
            )
        source = self.table[row, at]
        return replace(
            self._copied(source, jnp.where(bad, self.pages, page)),
            table=self.table.at[row, at].set(jnp.where(bad, source, page)),
            overflowed=self.overflowed.at[row].set(self.overflowed[row] | bad),
        )

    def reset(self, rows: Bool[Array, "*#B"]) -> "PagedCache":
        """Empties these rows; their pages stay in the table until the caller frees them."""
        rows = rows_to_reset(rows, self.length.shape)
        after = replace(
            self, length=jnp.where(rows, 0, self.length), overflowed=self.overflowed & ~rows
        )
        return sharded_like(after, self)

    @on_whole_rows
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
        count = self.length.shape[0]
        here = counted(count, 0) == jnp.where(jnp.asarray(row) < 0, row + count, row)
        whole = replace(self, length=jnp.where(here, 0, self.length))
        tokens = _as_tokens(keys, values, self.pool_values)
        new = mine._appended(*tokens, positions, whole, row)
        return replace(
            self,
            pool_keys=new.pool_keys,
            pool_values=new.pool_values,
            length=jnp.where(here, new.length, self.length),
            overflowed=jnp.where(here, new.overflowed, self.overflowed),
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
        check_row(row, self.length.shape[0], "insert")

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
