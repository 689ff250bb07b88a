"""Shared by layers with grouped heads: a constructor, and queries, keys and values.

N query heads share K key/value heads: query head n uses key/value head n // (N / K).
"""

from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_positive
from ..masks import CAUSAL, Mask
from ..rules import Rules
from ._cached import AnyCache, CacheOptions, arithmetic_dtype, new_cache
from ._common import split_heads
from ._forward import Heads, NormFn, RotaryFn
from ._init import LayerInit, LayerInitKeywords, keywords_of, layer_init_signature
from ._token_indices import RotaryPositions


class Grouped(LayerInitKeywords, total=False):
    """Keyword arguments of `GroupedHeads`, for layers that forward them.

    Usage: `@grouped_signature def __init__(..., **grouped: Unpack[Grouped])`.
    """

    rotary: RotaryFn | None
    q_norm: NormFn | None
    k_norm: NormFn | None
    norm_after_rotary: bool
    mask: Mask | Array
    rules: Rules
    sinks: bool
    qkv_bias: bool | str
    out_bias: bool


class GroupedHeads(Heads):
    """Base of layers with grouped heads; subclasses define `__call__`.

    Arguments are those of `GroupedQueryAttention`.
    """

    query_parts: int = 1  # output width of `q_proj`, in multiples of N H
    kv_projections: tuple[str, ...] = ("k_proj", "v_proj")  # those that the layer has
    key_bias: bool = True  # whether `qkv_bias` includes `k_proj`
    clip_qkv: float | None = None  # largest absolute value of a head's component
    k_proj: nnx.Linear
    v_proj: nnx.Linear

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: RotaryFn | None = None,
        q_norm: NormFn | None = None,
        k_norm: NormFn | None = None,
        norm_after_rotary: bool = False,
        mask: Mask | Array = CAUSAL,
        rules: Rules = Rules(),  # noqa: B008
        sinks: bool = False,
        qkv_bias: bool | str = False,
        out_bias: bool = False,
        **more: Unpack[LayerInitKeywords],
    ):
        self.refuse(k_norm, sinks)
        _check_sizes(in_features, num_heads, num_kv_heads, head_dim)
        _check_order(norm_after_rotary, rotary, q_norm, k_norm)
        self.set_rules(rotary, mask, rules)
        self.head_dim, self.num_kv_heads = head_dim, num_kv_heads
        self.q_norm, self.k_norm, self.norm_after_rotary = q_norm, k_norm, norm_after_rotary
        init = LayerInit(**more)
        q_width = self.query_parts * num_heads * head_dim
        self.q_proj = init.linear(in_features, q_width, use_bias=has_bias(qkv_bias, "q"))
        for name in self.kv_projections:
            kv_width = num_kv_heads * head_dim
            biased = has_bias(qkv_bias, name[0]) and (self.key_bias or name != "k_proj")
            setattr(self, name, init.linear(in_features, kv_width, use_bias=biased))
        self.o_proj = init.linear(num_heads * head_dim, in_features, use_bias=out_bias)
        self.sinks = nnx.Param(jnp.zeros(num_heads, init.param_dtype)) if sinks else None
        self.dropout = init.attention_dropout()

    def refuse(self, k_norm: NormFn | None, sinks: bool) -> None:
        """Raises ValueError for options that a layer does not support; by default all are."""

    def project(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions, cached: bool = False
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"], Any]:
        """Queries, keys and values, normalised and rotated if the layer has norms and a rotary."""
        return self.queries(x, positions), *self.keys_and_values(x, positions), None

    def queries(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions
    ) -> Float[Array, "*B T N H"]:
        """Queries, normalised and rotated."""
        q = split_heads(self.q_proj(x), self.head_dim)  # *B T N H
        return self.norm_and_rotate(q, self.q_norm, positions)

    def heads(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K H"]]:
        """Queries, keys and values."""
        return self.project(x, positions)[:3]

    def keys_and_values(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions
    ) -> tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]]:
        """Keys, normalised and rotated, and values."""
        k = split_heads(self.k_proj(x), self.head_dim)  # *B T K H
        k = self.norm_and_rotate(k, self.k_norm, positions)
        v = split_heads(self.v_proj(x), self.head_dim)  # *B T K H
        return k, v if self.clip_qkv is None else self.clipped(v, self.clip_qkv)

    def norm_and_rotate(
        self, x: Float[Array, "*B T N H"], norm: NormFn | None, positions: RotaryPositions
    ) -> Float[Array, "*B T N H"]:
        """Applies norm, clipping and rotary to the heads, in the layer's order."""
        x = x if norm is None or self.norm_after_rotary else norm(x)
        x = x if self.clip_qkv is None else self.clipped(x, self.clip_qkv)
        x = x if self.rotary is positions is None else self.rotate(x, positions)
        return norm(x) if norm is not None and self.norm_after_rotary else x

    def clipped(self, x: Float[Array, "*B T N H"], most: float) -> Float[Array, "*B T N H"]:
        """Clips the components of the heads to [-most, most]."""
        return jnp.clip(x, -most, most)


def has_bias(qkv_bias: bool | str, projection: str) -> bool:
    """Whether "q", "k" or "v" has a bias; raises ValueError for other letters in `qkv_bias`."""
    if not isinstance(qkv_bias, str):
        return qkv_bias
    if not qkv_bias or set(qkv_bias) - set("qkv"):
        raise ValueError(
            "qkv_bias is True, False, or names the projections with a bias by their letters, such "
            f"as 'qv'; got {qkv_bias!r}."
        )
    return projection in qkv_bias


class DecodingHeads(GroupedHeads):
    """`GroupedHeads` for layers that run on `attend`, and so support a cache."""

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache for this layer, used as `y, cache = layer(x, cache=cache)`.

        Args:
          batch: the batch axes `*B`; an int is one axis, () none.
          length: capacity of a row in tokens.
          options: window, keep_first, spare, dtype, store and layers, as in `Cache.empty`, or
            pages, as in `PagedCache.empty`, instead of a ring buffer. window="mask" covers the
            range that the layer's mask reaches back to; dtype defaults to the layer's.

        Raises:
          ValueError: for sizes and options that do not fit.
        """
        k = self.k_proj if "k_proj" in self.kv_projections else self.q_proj
        sizes = (self.num_kv_heads, self.head_dim, self.head_dim)
        return new_cache(batch, length, sizes, self.mask, arithmetic_dtype(k), options)


# For constructors with `**grouped`, so that `help` and `inspect` show all keywords.
grouped_signature = keywords_of(GroupedHeads)


def _check_sizes(in_features: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_positive(head_dim=head_dim)
    check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)


def _check_order(after: bool, rotary: RotaryFn | None, *norms: NormFn | None) -> None:
    if after and (rotary is None or all(norm is None for norm in norms)):
        raise ValueError(
            "norm_after_rotary=True says which of a norm and a rotary comes first; pass rotary= "
            "and one of q_norm= and k_norm=, or leave it out."
        )
