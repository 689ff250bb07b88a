"""DeepSeek sparse attention: latent attention over the keys that an indexer selects."""

from dataclasses import replace
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_positive
from .._internal.types import Sizes
from ..masks import Dense, Mask
from ..places import Positions
from ..quantized import Quantized
from ..rules import Rules
from ._cached import AnyCache, CacheOptions, arithmetic_dtype, new_cache
from ._common import as_module_data, visible_states
from ._indexer import Indexer
from ._init import LayerInit
from ._latent import Latent, LatentHeads, latent_signature
from ._self_attention import RotaryFn, SelfAttention, Tokens


class IndexedSparseAttention(LatentHeads, SelfAttention):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`LatentAttention` in which each query attends to only top_k keys.

    Also called: DeepSeek sparse attention (DSA), attention with a lightning indexer.

    The indexer scores each pair of a query t and a key s by `sum_h w_h(t) relu(q_h(t) . k(s))` over
    index_heads heads, with queries from the queries' latent and one key per token. All heads attend
    to the top_k keys with the largest scores among those that the mask allows; ties go to earlier
    keys, where torch leaves them undefined. Few heads give many zeros and so many ties; published
    models have 32 or more. No gradient flows through the selection, so this layer's output does not
    train the indexer.

    The selection is a mask for `attend`, which still computes all logits: results equal DeepSeek's,
    but the layer saves neither time nor memory. The index scores, index_heads T S per batch entry,
    are materialized.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim: as in `LatentAttention`.
      index_heads: heads of the indexer.
      index_dim: width of such a head; its first rotary_dim components are rotated.
      top_k: number of keys per query.
      index_rotary: the rotary of the indexer; None for none. DeepSeek-V3.2 uses layout "half" here,
        and "interleaved" in the attention.
      latent: the keywords of `LatentAttention`.

    Raises:
      ValueError: for counts below 1, an index_dim below rotary_dim with an index_rotary; in the
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
        index_rotary: RotaryFn | None = None,
        **latent: Unpack[Latent],
    ):
        check_positive(index_heads=index_heads, index_dim=index_dim, top_k=top_k)
        if index_rotary is not None and index_dim < rotary_dim:
            raise ValueError(
                "index_dim must be at least rotary_dim, whose components index_rotary rotates; got "
                f"index_dim={index_dim}, rotary_dim={rotary_dim}."
            )
        sizes = (in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim)
        super().__init__(*sizes, **latent)
        self.index_rotary = as_module_data(index_rotary)
        init = LayerInit.of(latent)
        widths = (latent.get("q_rank") or in_features, in_features)
        sizes = (index_heads, index_dim, rotary_dim)
        self.indexer = Indexer(init.linear, widths, sizes, top_k, init.param_dtype)

    def project(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Any, bool]:
        """As in `LatentAttention`; beside a cache the indexer's key is appended to the heads' key.

        Queries are padded with zeros.
        """
        q, k, v, absorbed = super().project(tokens)
        if tokens.cache is not None:
            k = _concatenated(k, self.index_keys(tokens)[..., None, :].astype(k.dtype))
            q = _concatenated(q, jnp.zeros((*q.shape[:-1], self.indexer.dim), q.dtype))
        return q, k, v, absorbed

    def index_keys(self, tokens: Tokens) -> Float[Array, "*B T I"]:
        """The indexer's key of each token."""
        return self.indexer.keys(tokens.x, self.index_rotary, tokens.positions)

    def attention(
        self, q: Float[Array, "*B T N H"], k: Float[Array, "*B T K H"], v: Any, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N h"], Any]:
        """Attention over the keys that the indexer selects among those visible in the mask."""
        x, mask, cache = tokens.x, tokens.rules.mask, tokens.cache
        if cache is None:
            keys, may = self.index_keys(tokens), visible_states(mask, x, x)  # *B T I, *B T T
        else:
            at: Any = cache  # `Cache.append`, or `PagedCache.append`
            q_positions = at.next_positions(x.shape[-2], tokens.real)
            keys, may = _stored(at.append(k, None, q_positions), q_positions, mask)
            keys = keys[..., -self.indexer.dim :]  # *B S I
        latent = self.q_latent(x)  # *B T R
        chosen = self.indexer(x, latent, keys, may, self.index_rotary, tokens.positions)  # *B T S
        rules = replace(tokens.rules, mask=Dense(chosen[..., None, :, :]))
        return super().attention(q, k, v, tokens._replace(rules=rules))

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache; arguments as in `GroupedQueryAttention.init_cache`.

        It stores kv_rank + rotary_dim + index_dim numbers per token. Keys are selected among all
        tokens, so window and pages are not supported.
        """
        width = self.kv_b_proj.in_features + self.rotary_dim + self.indexer.dim
        dtype = arithmetic_dtype(self.kv_a_proj_with_mqa)
        cache = new_cache(batch, length, (1, width, width), self.mask, dtype, options, latent=True)
        if not cache.by_slot:
            raise ValueError(
                "An indexer chooses among all tokens by their slots: make its cache without "
                "window= and pages=."
            )
        return cache


def _stored(
    cache: AnyCache, q_positions: Int[Array, "*B T"], mask: Mask
) -> tuple[Float[Array, "*B S H"], Bool[Array, "*B T S"]]:
    """The keys in a cache, and which of them each new token may attend to."""
    keys, _, positions = cache.read()
    keys = keys.dequantized(jnp.float32) if isinstance(keys, Quantized) else keys
    keys = keys[..., 0, :, :]  # *B S H
    sizes = Sizes(q_positions.shape[:-1], 1, q_positions.shape[-1], positions.shape[-1])
    rules = Rules(mask=mask, positions=Positions(q_positions, positions, in_order=True))
    may = rules.bind(sizes, 1).mask.grid(sizes)  # broadcasts to B 1 T S
    may = jnp.broadcast_to(may, (sizes.B, 1, sizes.T, sizes.S))
    return keys, may.reshape(*sizes.batch, sizes.T, sizes.S)


def _concatenated(x: Array, y: Array) -> Array:
    return jnp.concatenate([x, y], axis=-1)
