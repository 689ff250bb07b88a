"""The forward pass shared by layers of cross and self attention, and their caches.

x, memory, visible = tokens with zeros at padding, the source of keys and values, the mask
indices            = token indices, for mask and score
q                  = heads of x
o                  = attend(q, keys_and_values(memory)), or over a cache or a `Memory`
y                  = the output projection; zeros at padding
"""

from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ..attend import Empty
from ..cache import Memory
from ..cache.checks import refuse_later
from ..masks import Mask
from ..scores import IDENTITY
from ._cached import (
    AnyCache,
    CacheOptions,
    arithmetic_dtype,
    cache_memory,
    check_empty,
    cross_attend,
    new_cache,
    with_cache,
)
from ._common import merge_heads, split_heads
from ._dropout import AttentionDropout
from ._inputs import tokens, zero_padding
from ._layer import Layer
from ._self_attention import NormFn


class CrossForward(Layer):
    """Base of cross-attention layers. Subclasses define `projections`, and call `forward`."""

    head_dim: int
    mask: Mask
    dropout: AttentionDropout | None
    q_norm: NormFn | None = None
    k_norm: NormFn | None = None

    def projections(self) -> tuple[nnx.Linear, nnx.Linear, nnx.Linear, nnx.Linear]:
        """The projections of queries, keys, values and output, whatever the layer names them."""
        raise NotImplementedError

    def forward(
        self,
        attend_kwargs: dict[str, Any],
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | Memory | None = None,
    ) -> Any:
        """Computes the layer. `attend_kwargs` go to `attend`; the rest are the call's arguments."""
        check_empty(empty, cache)
        if memory is mask is None and isinstance(cache, AnyCache) and self.mask.shows_later:
            refuse_later(self.mask)
        q_proj, k_proj, _, out_proj = self.projections()
        widths = q_proj.in_features, k_proj.in_features
        score = attend_kwargs.get("score", IDENTITY)
        x, memory, visible, indices = tokens(
            x, memory, self.mask, mask, valid, widths, cache, positions, score
        )
        q = _normalize(self.q_norm, split_heads(q_proj(x), self.head_dim))  # *B T N H
        drop = None if self.dropout is None else self.dropout(deterministic)
        attend_kwargs = {
            **attend_kwargs,
            "mask": visible,
            "dropout": drop,
            "score": indices.score(score),
        }
        attend_kwargs |= {"valid": valid, "order": indices.order, "empty": empty}
        o, cache = cross_attend(q, memory, self.keys_and_values, cache, **attend_kwargs)  # *B T N H
        if indices.unknown is not None:
            o = jnp.where(indices.unknown[..., None, None, None], jnp.nan, o)
        return with_cache(zero_padding(out_proj(merge_heads(o)), valid), cache)  # *B T D

    def keys_and_values(
        self, memory: Float[Array, "*B S E"]
    ) -> tuple[Float[Array, "*B S K H"], Float[Array, "*B S K H"]]:
        """Keys and values of each token of a memory."""
        _, k_proj, v_proj, _ = self.projections()
        k, v = (split_heads(project(memory), self.head_dim) for project in (k_proj, v_proj))
        return _normalize(self.k_norm, k), v

    def remember(
        self, memory: Float[Array, "*B S E"], valid: Bool[Array, "*#B S"] | Mask | None = None
    ) -> Memory:
        """Precomputes keys and values of a memory: `y, cache = layer(x, cache=memory)` uses them.

        Args:
          memory: as in the call.
          valid: which of its tokens are real; padding is masked.

        Raises:
          TypeError, ValueError: as the call does.
        """
        return cache_memory(memory, valid, self.projections()[1].in_features, self.keys_and_values)

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """Empty cache for self attention; arguments as in `GroupedQueryAttention.init_cache`."""
        k_proj = self.projections()[1]
        sizes = (k_proj.out_features // self.head_dim, self.head_dim, self.head_dim)
        return new_cache(batch, length, sizes, self.mask, arithmetic_dtype(k_proj), options)


def _normalize(norm: NormFn | None, x: Float[Array, "*B T N H"]) -> Float[Array, "*B T N H"]:
    """Applies `norm` to the heads, unless it is None."""
    return x if norm is None else norm(x)
