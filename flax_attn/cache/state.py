"""State of a recurrent layer between calls, the counterpart of a KV cache."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.types import frozen
from ..recurrence.documents import Joined, join_documents
from .meshes import sharded_like
from .rows import inserted, rows_to_reset, taken


@frozen
class State:
    """State of a recurrent layer after the tokens so far; its size does not depend on their number.

    Also called: recurrent state, SSM state, convolution state.

    Made by `layer.init_cache(batch, length)`; `layer(x, cache=state)` gives the next one. It is a
    frozen pytree whose shapes and dtypes stay, so that `jax.lax.scan` can carry it.

    Attributes:
      recurrent: the state of the recurrence, such as `*B N H h`; None where there is none.
      convolution: `*B V D`, the last tokens before a short convolution; None where there is none.
      length: `*B`, number of tokens processed.
      segment: `*B`, the document of the last valid token, its id as int32. A call goes on with the
        state if its first token has this id or if it is given no ids, and else starts afresh.
      has_segment: `*B`, whether `segment` says anything: it does after a call with ids. Both may be
        None, as in states of earlier versions, until the next such call.

    Raises:
      ValueError: by `insert`, if a row does not fit; by `truncate`, always.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    >>> from flax import nnx
    >>> from flax_attn import GatedDeltaAttention
    >>> layer = GatedDeltaAttention(6, 2, 4, 5, rngs=nnx.Rngs(0))
    >>> state = layer.init_cache(3, 100)
    >>> y, state = nnx.jit(GatedDeltaAttention.__call__)(layer, jnp.ones((3, 7, 6)), cache=state)
    >>> y.shape, state.recurrent.shape, state.length.tolist()
    ((3, 7, 6), (3, 2, 4, 5), [7, 7, 7])
    """

    recurrent: Any
    convolution: Any
    length: Any
    segment: Any = None
    has_segment: Any = None

    def join_documents(
        self,
        x: Float[Array, "*B T D"],
        segments: Int[Array, "*#B T"],
        valid: Bool[Array, "*#B T"] | None = None,
    ) -> Joined:
        """Relates the documents of a call to the last one before it; arguments as of a layer."""
        if self.segment is None:
            none = jnp.zeros_like(self.length)
            return join_documents(x, segments, valid, none, none > 0)
        return join_documents(x, segments, valid, self.segment, self.has_segment)

    def advance(
        self,
        recurrent: Float[Array, "..."] | None,
        convolution: Float[Array, "*B V D"] | None,
        tokens: Int[Array, "*#B"] | int,
        documents: Joined | None = None,
    ) -> "State":
        """The state after further tokens, in the dtypes of this one.

        Args:
          recurrent, convolution: states after them; None if the layer has none.
          tokens: their number.
          documents: of the tokens; None if all continue the last document.
        """
        recurrent_state, conv_state = self.recurrent, self.convolution
        if recurrent is not None:
            recurrent_state = recurrent.astype(self.recurrent.dtype)
        if convolution is not None:
            conv_state = convolution.astype(self.convolution.dtype)
        length = self.length + jnp.asarray(tokens, self.length.dtype)
        new = replace(self, recurrent=recurrent_state, convolution=conv_state, length=length)
        if documents is None:
            return new
        return replace(new, segment=documents.segment, has_segment=documents.has_segment)

    def take(self, rows: Int[Array, " R"]) -> "State":
        """Selects rows along the first batch axis, in this order."""
        return taken(self, rows, self.length.shape[0])

    def reset(self, rows: Bool[Array, "*#B"]) -> "State":
        """Resets these rows to the state before the first token."""
        rows = rows_to_reset(rows, self.length.shape)

        def reset_where(x: jax.Array) -> jax.Array:
            rows_of_x = rows.reshape(*rows.shape, *[1] * (x.ndim - rows.ndim))
            return jnp.where(rows_of_x, jnp.zeros((), x.dtype), x)

        return sharded_like(jax.tree.map(reset_where, self), self)

    def insert(self, row: int | jax.Array, other: "State") -> "State":
        """Replaces a row of the first batch axis by `other`, of one row.

        Raises:
          ValueError: if `other` differs in anything but the number of rows, or has not one.
        """
        return inserted(self, row, other, self.length.shape[0])

    def truncate(self, length: int | Int[Array, "*#B"]) -> "State":
        """Always raises: a recurrence cannot remove tokens from its state."""
        raise ValueError(
            "A State cannot be truncated, since a recurrence mixes tokens into one sum. Keep the "
            f"State from before the tokens to take back, and go on from it; got length={length}."
        )

    def check(self) -> "State":
        """Returns the state; it cannot overflow."""
        return self
