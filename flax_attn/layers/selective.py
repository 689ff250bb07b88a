"""Selective attention: a query can hide a key from all queries after it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._internal.types import Sizes
from ..by_weights import attend_by_weights
from ._token_indices import Documents
from ._weights import WeightsAttention


def selection_penalty(
    logits: Float[Array, "B N T S"],
    visible: Bool[Array, "#B #N T S"],
    first: Bool[Array, "#B S"] | None = None,
) -> Float[Array, "B 1 T S"]:
    """What each query subtracts from its scores: the sum of what the queries before it selected.

    A query selects a key as strongly as its logit in the first head is above zero. It cannot select
    itself, a key that it does not see, or a first key; `first` says which keys are, of each
    document and row, and None stands for the one of slot 0.
    """
    T, S = logits.shape[-2:]
    first = (jnp.arange(S) == 0)[None] if first is None else first
    selectable = visible[:, :1] & ~jnp.eye(T, S, dtype=bool)[None, None] & ~first[:, None, None]
    selected = jnp.where(selectable, jnp.maximum(logits[:, :1], 0), 0)  # B 1 T S
    return jnp.cumsum(selected, axis=-2) - selected


class SelectiveAttention(WeightsAttention):
    """`o_proj(softmax(scale * q.k - F) . v)`, `F[t]` the sum over i < t of `relu(scale * q.k)[i]`.

    The logits in F are those of the first head. A query may select a key, which is then hidden,
    more or less, from all queries after it. Holds all weights, T x S a head, since F sums rows.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as of `GroupedQueryAttention`.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`,
        `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as of `GroupedQueryAttention`, and for sinks.
      TypeError: as of `GroupedQueryAttention`.

    Source: Leviathan, Kalman and Matias, "Selective Attention Improves Transformer", 2024.

    >>> from flax import nnx
    >>> layer = SelectiveAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    reads_documents = True

    def read(
        self, q: Array, k: Array, v: Array, *, documents: Documents, **attend_kwargs: Any
    ) -> Float[Array, "*B T N H"]:
        """Softmax of the logits less what earlier queries have selected."""
        tokens = q.shape[-3]
        first = _first_tokens(documents, q.shape[:-2])
        sizes = Sizes(q.shape[:-3], q.shape[-2], tokens, tokens)
        visible = jnp.asarray(attend_kwargs["mask"].bind(sizes).grid(sizes))

        def select(logits: jax.Array) -> jax.Array:
            return logits - selection_penalty(logits, visible, first)

        return attend_by_weights(q, k, v, mix_scores=select, **attend_kwargs)


def _first_tokens(documents: Documents, shape: tuple[int, ...]) -> Bool[Array, "B T"] | None:
    """The first real token of each document, all batch axes as one; None for that of slot 0."""
    if documents.is_unpacked:
        return None
    valid = jnp.ones(shape, bool) if documents.valid is None else documents.valid
    ids = jnp.zeros(shape, jnp.int32) if documents.ids is None else documents.ids
    valid, ids = (x.reshape(-1, shape[-1]) for x in (valid, ids))
    earlier = jnp.tri(shape[-1], k=-1, dtype=bool)[None] & valid[:, None, :]  # B T T
    return valid & ~(earlier & (ids[:, :, None] == ids[:, None, :])).any(axis=-1)
