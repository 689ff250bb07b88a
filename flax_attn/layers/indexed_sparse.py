"""Latent attention over few keys, which a small indexer chooses: DeepSeek's sparse attention."""

from typing import Any, Unpack

from jaxtyping import Array, Float

from .._checks import check_positive
from ..attend import attend
from ..masks import Dense
from ._common import as_attribute
from ._forward import Turn, Uncached
from ._house import House
from ._indexer import Indexer
from ._latent import Latent, LatentHeads, latent_signature
from ._numbers import RotaryPositions


class IndexedSparseAttention(LatentHeads, Uncached):
    """`LatentAttention` in which a query looks at top_k keys alone.

    Also called: DeepSeek sparse attention (DSA), attention with a lightning indexer.

    The indexer scores each pair of a query t and a key s by `sum_h w_h(t) relu(q_h(t) . k(s))` over
    index_heads heads, with queries from the queries' latent and one key a token. The top_k keys of
    the largest scores among those that the mask allows are seen, the same by all heads; of equal
    scores the earlier keys are taken, where torch takes any. Few heads make many zeros and so many
    equal scores; published models have 32 or more. No gradient goes through the choice, so that the
    indexer is not trained by this layer's output.

    The choice is a mask for `attend`, which computes all logits as before: the layer gives what
    DeepSeek's gives and saves neither time nor memory. The index scores, index_heads T S a batch
    entry, are computed whole.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim: as of `LatentAttention`.
      index_heads: heads of the indexer.
      index_dim: width of such a head, of which the first rotary_dim components are turned.
      top_k: how many keys a query looks at.
      index_rotary: the rotary of the indexer; None for none. DeepSeek-V3.2 turns halves here, and
        interleaved pairs in the attention.
      latent: the keywords of `LatentAttention`.

    Raises:
      ValueError: for counts below 1, an index_dim below rotary_dim beside an index_rotary; in the
        call, for a mask that differs by head; and as `LatentAttention` does.
      TypeError: as `LatentAttention` does.

    Source: DeepSeek-AI, "DeepSeek-V3.2-Exp: Boosting Long-Context Efficiency with DeepSeek Sparse
    Attention", 2025; names as in its published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> sizes = {"index_heads": 16, "index_dim": 9, "top_k": 3}
    >>> layer = IndexedSparseAttention(12, 3, 5, 6, 4, 7, q_rank=8, **sizes, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    @latent_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        kv_rank: int,
        nope_dim: int,
        rotary_dim: int,
        value_dim: int,
        *,
        index_heads: int,
        index_dim: int,
        top_k: int,
        index_rotary: Turn | None = None,
        **latent: Unpack[Latent],
    ):
        check_positive(index_heads=index_heads, index_dim=index_dim, top_k=top_k)
        if index_rotary is not None and index_dim < rotary_dim:
            raise ValueError(
                "index_dim must be at least rotary_dim, whose components index_rotary turns; got "
                f"index_dim={index_dim}, rotary_dim={rotary_dim}."
            )
        sizes = (in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim)
        super().__init__(*sizes, **latent)
        self.index_rotary = as_attribute(index_rotary)
        house = House.of(latent)
        widths = (latent.get("q_rank") or in_features, in_features)
        sizes = (index_heads, index_dim, rotary_dim)
        self.indexer = Indexer(house.linear, widths, sizes, top_k, house.param_dtype)

    def read(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions, **how: Any
    ) -> Float[Array, "*B T N h"]:
        """What the heads have read of the keys that the indexer chose."""
        latent = self.q_latent(x)  # *B T R
        q = self.queries(latent, positions)  # *B T N M, *B T N P
        kv = self.kv_latent(x, positions)  # *B T L, *B T 1 P
        q, k, v = self.heads(q, kv, self.absorbed)  # *B T N H, *B T K H, *B T K h
        chosen = self.indexer(x, latent, how["mask"], self.index_rotary, positions)  # *B T T
        how["mask"] = Dense(chosen[..., None, :, :])
        return self.from_latent(attend(q, k, v, **how), self.absorbed)  # *B T N h
