"""Selective attention: a query can mask a key for all later queries."""

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
    """The penalty of each query's scores: the sum of the selections of earlier queries.

    A query selects a key by `relu` of its logit in the first head. It cannot select itself, a
    masked key, or a first key; `first` marks the first keys of documents and rows, and None means
    slot 0.
    """
    T, S = logits.shape[-2:]
    first = (jnp.arange(S) == 0)[None] if first is None else first
    selectable = visible[:, :1] & ~jnp.eye(T, S, dtype=bool)[None, None] & ~first[:, None, None]
    selected = jnp.where(selectable, jnp.maximum(logits[:, :1], 0), 0)  # B 1 T S
    return jnp.cumsum(selected, axis=-2) - selected


class SelectiveAttention(WeightsAttention):
    """`o_proj(softmax(scale * q.k - F) . v)`, `F[t]` the sum over i < t of `relu(scale * q.k)[i]`.

    The logits in F are those of the first head. A query may select a key, which lowers its score
    for all later queries. Materializes all weights, T x S per head, since F sums over rows.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`,
        `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, and for sinks.
      TypeError: as in `GroupedQueryAttention`.

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
        """Attention with the logits minus the selections of earlier queries."""
        tokens = q.shape[-3]
        first = _first_tokens(documents, q.shape[:-2])
        sizes = Sizes(q.shape[:-3], q.shape[-2], tokens, tokens)
        grid = jnp.asarray(attend_kwargs["mask"].bind(sizes).grid(sizes))  # FULL's is a scalar
        shape = jnp.broadcast_shapes(grid.shape, (1, 1, tokens, tokens))
        visible = jnp.broadcast_to(grid, shape)  # #B #N T T

        def select(logits: jax.Array) -> jax.Array:
            return logits - selection_penalty(logits, visible, first)

        return attend_by_weights(q, k, v, mix_scores=select, **attend_kwargs)


def _first_tokens(documents: Documents, shape: tuple[int, ...]) -> Bool[Array, "B T"] | None:
    """First real token of each document, with flattened batch axes; None means slot 0."""
    if documents.is_unpacked:
        return None
    valid = jnp.ones(shape, bool) if documents.valid is None else documents.valid
    ids = jnp.zeros(shape, jnp.int32) if documents.ids is None else documents.ids
    valid, ids = (x.reshape(-1, shape[-1]) for x in (valid, ids))
    earlier = jnp.tri(shape[-1], k=-1, dtype=bool)[None] & valid[:, None, :]  # B T T
    return valid & ~(earlier & (ids[:, :, None] == ids[:, None, :])).any(axis=-1)
