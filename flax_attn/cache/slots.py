"""A cache of keys and values in slots: static, or a ring that keeps a window of tokens.

Masks and scores are evaluated at positions, never at slots: `positions` holds the position of each
slot's token, or -1 for an empty slot. So a mask means the same in a static cache and in a ring,
with padding, and after `truncate`.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_positive
from .._internal.renamed import RenamedAttribute
from .._internal.types import frozen
from ..masks import Mask
from ..quantized import Float8, Int8
from ..sharding.specs import spec_of
from .meshes import explicit_mesh, mesh_of_sharded, resharded, sharded_like
from .rows import (
    batch_axes,
    check_overflow,
    check_room,
    first_row,
    inserted,
    next_positions,
    put,
    rows_to_reset,
    taken,
    truncated_lengths,
)

Store = Int8 | Float8


@frozen
class Cache:
    """Keys and values of the tokens so far; `attend_cached` and layers return an updated one.

    Also called: KV cache, key/value cache; as a ring, sliding-window or rolling cache.

    It is a frozen pytree, made by `Cache.empty` or by a layer's `init_cache`. Shapes and dtypes
    never change, so it can be carried by `jax.lax.scan`, donated, and kept in an `nnx.Variable`.
    For a scan over layers the arrays have an axis of layers in front; inside the scan they have
    none, and there the methods are called.

    Attributes:
      keys, values: `*B K S H` and `*B K S h`, or `Quantized`; values None for a latent cache,
        whose values are the first columns of its keys.
      positions: `*B S`, the position of the token in each slot, -1 where there is none.
      length: `*B`, how many tokens are stored, without those that `truncate` removed. It is the
        position of the next token.
      overflowed: `*B`, rows that got more tokens than they have slots. They store no more
        tokens, and their outputs are NaN.
      window: how many tokens back a ring reaches, the token itself included; None for no ring.
      keep_first: how many tokens from the start a ring always keeps.
      spare: how many tokens `truncate` can remove from a ring.
      store: how keys and values are quantized, or None.

    Raises:
      ValueError: by its methods, which say why.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, for rings
    that keep the first tokens; here tokens keep their original positions.

    >>> from flax_attn import Cache, attend_cached
    >>> cache = Cache.empty(2, 8, 3, 4)  # two rows, eight tokens, three key heads of width 4
    >>> x = jnp.ones((2, 5, 3, 4))
    >>> o, cache = jax.jit(attend_cached)(x, x, x, cache)
    >>> o.shape, cache.length.tolist()
    ((2, 5, 3, 4), [5, 5])
    """

    keys: Any
    values: Any
    positions: Any
    length: Any
    overflowed: Any
    window: int | None = None
    keep_first: int = 0
    spare: int = 0
    store: Store | None = None

    @staticmethod
    def empty(
        batch: int | tuple[int, ...],
        length: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        window: int | None = None,
        keep_first: int = 0,
        spare: int = 0,
        dtype: Any = jnp.float32,
        store: Store | None = None,
        latent: bool = False,
        layers: int | None = None,
    ) -> "Cache":
        """An empty cache.

        Args:
          batch: the batch axes `*B`; a number stands for one axis, () for none.
          length: tokens that a row can hold.
          num_kv_heads, head_dim: key heads K and their width H.
          value_dim: width h of the values; None for H.
          window: keep only so many tokens, the newest included, in a ring that never overflows: for
            a mask `CAUSAL & Window(window - 1, 0)`. If `length` tokens fit into the slots that the
            ring would need, no ring is made.
          keep_first: further tokens, from the start, that the ring keeps.
          spare: further slots of the ring, so that `truncate` can remove as many tokens.
          dtype: of keys and values.
          store: `Int8()` or `Float8()`, with one scale per token and head.
          latent: whether values are the first columns of the keys, and stored only there.
          layers: how many layers share one stack, for a scan over them; None for no such axis.

        Raises:
          ValueError: for sizes below 1, or `keep_first` or `spare` without a window.
        """
        axes = batch_axes(batch, layers)
        value_dim = head_dim if value_dim is None else value_dim
        check_positive(length=length, num_kv_heads=num_kv_heads, head_dim=head_dim)
        check_positive(value_dim=value_dim)
        ring = _ring(length, window, keep_first, spare)
        slots = sum(ring.values()) if ring else length

        def zeros(width: int) -> Any:
            x = jnp.zeros((*axes, num_kv_heads, slots, width), dtype)
            return x if store is None else store.quantize(x)

        return Cache(
            keys=zeros(head_dim),
            values=None if latent else zeros(value_dim),
            positions=jnp.full((*axes, slots), -1, jnp.int32),
            length=jnp.zeros(axes, jnp.int32),
            overflowed=jnp.zeros(axes, bool),
            store=store,
            **ring,
        )

    @property
    def slots(self) -> int:
        """Capacity of a row in tokens, S."""
        return self.positions.shape[-1]

    @property
    def latent(self) -> bool:
        """Whether the values are the first columns of the keys."""
        return self.values is None

    @property
    def by_slot(self) -> bool:
        """Whether token p is in slot p, so that masks with an axis of S apply."""
        return self.window is None

    next_places = RenamedAttribute("next_positions", goes="0.6.0")

    def next_positions(
        self, T: int, valid: Bool[Array, "*#B T"] | Mask | None = None
    ) -> Int[Array, "*B T"]:
        """Positions of the next T tokens, -1 for padding."""
        return next_positions(self.length, T, valid)

    def holds_beside(self, T: int) -> bool:
        """Whether T tokens can be written before attending, without overwriting visible tokens."""
        return self.window is None or T <= self.spare + 1

    def append(
        self,
        k: Float[Array, "*B T K H"],
        v: Float[Array, "*B T K h"] | None,
        positions: Int[Array, "*B T"],
    ) -> "Cache":
        """Appends T tokens at the positions that `next_positions` returned.

        Raises:
          ValueError: outside jit, if a row has no room for them; nothing is written then.
        """
        mesh = explicit_mesh((self, k, positions))
        if mesh is not None:
            rows, sharded = spec_of(self.length), mesh_of_sharded((self.length, positions))
            positions = resharded(positions, sharded, *rows)
        # Padding has position -1, so the new length is one more than the largest position.
        new = jnp.maximum(self.length, jnp.max(positions, axis=-1, initial=-1) + 1)
        over = self.overflowed
        if self.window is None:
            check_room(self.slots, new)
            over = over | (new > self.slots)
        slots = self._slots_of(jnp.where(over[..., None], -1, positions), new)
        values = None if v is None else self._put(self.values, v, slots)
        after = replace(
            self,
            keys=self._put(self.keys, k, slots),
            values=values,
            positions=put(self.positions, slots, positions, heads=False),
            length=jnp.where(over, self.length, new),
            overflowed=over,
        )
        return after if mesh is None else sharded_like(after, self)

    def _slots_of(self, positions: jax.Array, new: jax.Array) -> jax.Array:
        """Slot of each token; past the end, where writes are dropped, for tokens without one."""
        slots = positions
        if self.window is not None:
            first, round_ = self.keep_first, self.slots - self.keep_first
            slots = jnp.where(positions < first, positions, first + (positions - first) % round_)
            # Scatter order is undefined, so a token that a later one in the same call would replace
            # is not written at all.
            gone = (positions >= first) & (positions < new[..., None] - round_)
            slots = jnp.where(gone, self.slots, slots)
        return jnp.where(positions < 0, self.slots, slots)

    def _put(self, stored: Any, x: jax.Array, slots: jax.Array) -> Any:
        new = x if self.store is None else self.store.quantize(x)
        return jax.tree.map(lambda c, y: put(c, slots, y), stored, new)

    def read(self) -> tuple[Any, Any, jax.Array]:
        """Stored keys and values, `*B K S H`, and the positions of their tokens."""
        return self.keys, self.keys if self.values is None else self.values, self.positions

    def truncate(self, length: int | Int[Array, "*#B"]) -> "Cache":
        """Removes the tokens from position `length` on, such as rejected drafts.

        Raises:
          ValueError: outside jit, for a length below 0, or if a ring no longer holds the window
            before that position: it takes back as many tokens as it has `spare`. Under jit the row
            counts as overflowed.
        """
        length, bad = truncated_lengths(length, self.length)
        over = self.overflowed | bad
        if self.window is not None:
            first = jnp.minimum(self.keep_first, length)  # which are stored in any case
            least = jnp.maximum(first, length - self.window)
            # Tokens of the window that later ones have overwritten cannot come back.
            lost = (length < self.length) & (self._count(least, length) < length - least)
            if not isinstance(lost, Tracer) and lost.any():
                raise ValueError(
                    f"The ring has spare={self.spare}, so that truncate can take back as many "
                    f"tokens; row {first_row(lost)} would lose more. Make it with a larger spare=."
                )
            over = over | lost
        positions = jnp.where(self.positions < length[..., None], self.positions, -1)
        after = replace(self, length=length, positions=positions, overflowed=over)
        return sharded_like(after, self)

    def _count(self, start: jax.Array, stop: jax.Array) -> jax.Array:
        """Number of stored tokens with positions in [start, stop)."""
        inside = (self.positions >= start[..., None]) & (self.positions < stop[..., None])
        return inside.sum(axis=-1, dtype=jnp.int32)

    def take(self, rows: Int[Array, " R"]) -> "Cache":
        """Selects rows along the first batch axis, such as the surviving beams."""
        return taken(self, rows, self.length.shape[0])

    def reset(self, rows: Bool[Array, "*#B"]) -> "Cache":
        """Empties these rows, for new sequences."""
        rows = rows_to_reset(rows, self.length.shape)
        after = replace(
            self,
            positions=jnp.where(rows[..., None], -1, self.positions),
            length=jnp.where(rows, 0, self.length),
            overflowed=self.overflowed & ~rows,
        )
        return sharded_like(after, self)

    def insert(self, row: int | jax.Array, other: "Cache") -> "Cache":
        """Replaces a row of the first batch axis by `other`, a cache of one row.

        Raises:
          ValueError: if `other` differs in anything but the number of rows, or has not one.
        """
        return inserted(self, row, other, self.length.shape[0])

    def check(self) -> "Cache":
        """Returns the cache unless a row has overflowed.

        Raises:
          ValueError: naming the rows.
        """
        check_overflow(self.overflowed, self.slots)
        return self


def _ring(length: int, window: int | None, keep_first: int, spare: int) -> dict[str, int]:
    """Window, first tokens and spare slots of a ring; empty if a static cache is no larger."""
    ring = {"keep_first": keep_first, "spare": spare}
    if window is None:
        if keep_first or spare:
            raise ValueError(
                "keep_first and spare are for a ring, which has a window; got window=None, "
                f"keep_first={keep_first}, spare={spare}."
            )
        return {}
    check_positive(window=window)
    if keep_first < 0 or spare < 0:
        raise ValueError(
            f"keep_first and spare are counts of 0 or more; got {keep_first} and {spare}."
        )
    return {"window": window, **ring} if window + keep_first + spare < length else {}
