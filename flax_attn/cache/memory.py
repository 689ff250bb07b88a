"""Memory of cross attention: keys and values computed once and read at every step."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.types import frozen
from ..masks import Mask
from .meshes import sharded_like
from .rows import inserted, next_positions, rows_to_reset, taken


@frozen
class Memory:
    """Keys and values of a context, such as an encoder's output, for a decoder's steps.

    Also called: cross-attention KV cache, encoder cache.

    Made by `layer.remember(context, valid=None)`, and read by `layer(x, cache=memory)`, which
    returns it unchanged. It is a frozen pytree, as `Cache` is.

    Attributes:
      keys, values: `*B K S H` and `*B K S h`.
      positions: `*B S`, the order of each token among the real ones, -1 for padding.

    Raises:
      ValueError: by its methods, if a row does not fit.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3.

    >>> from flax_attn import Memory, attend_memory
    >>> memory = Memory.of(jnp.ones((2, 7, 3, 4)), jnp.ones((2, 7, 3, 5)))
    >>> attend_memory(jnp.ones((2, 1, 6, 4)), memory).shape
    (2, 1, 6, 5)
    """

    keys: Any
    values: Any
    positions: Any

    @staticmethod
    def of(
        k: Float[Array, "*B S K H"],
        v: Float[Array, "*B S K h"],
        valid: Bool[Array, "*#B S"] | Mask | None = None,
    ) -> "Memory":
        """Builds a memory from keys and values; padding is never visible.

        Raises:
          TypeError: if `valid` is not boolean.
          ValueError: if it does not broadcast to `*B S`.
        """
        *batch, S, _, _ = k.shape
        positions = next_positions(jnp.zeros(batch, jnp.int32), S, valid)
        return Memory(jnp.swapaxes(k, -3, -2), jnp.swapaxes(v, -3, -2), positions)

    def take(self, rows: Int[Array, " R"]) -> "Memory":
        """Selects rows along the first batch axis, in this order."""
        return taken(self, rows, self.positions.shape[0])

    def reset(self, rows: Bool[Array, "*#B"]) -> "Memory":
        """Empties these rows: queries see no key there."""
        rows = rows_to_reset(rows, self.positions.shape[:-1])
        after = replace(self, positions=jnp.where(rows[..., None], -1, self.positions))
        return sharded_like(after, self)

    def insert(self, row: int | jax.Array, other: "Memory") -> "Memory":
        """Replaces a row of the first batch axis by `other`, of one row.

        Raises:
          ValueError: if `other` differs in anything but the number of rows, or has not one.
        """
        return inserted(self, row, other, self.positions.shape[0])

    def check(self) -> "Memory":
        """Returns the memory; it cannot overflow."""
        return self
