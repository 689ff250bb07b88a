"""Cross attention: queries of one sequence over keys of another (Vaswani et al., 2017)."""

from typing import Any, Unpack, overload

from flax import nnx
from jaxtyping import Array, Bool, Float

from .._checks import check_divides, check_positive
from ..attend import Empty
from ..cache import Memory
from ..masks import FULL, Mask, as_mask
from ._cached import (
    AnyCache,
    CacheOptions,
    CrossCall,
    M,
    arithmetic_dtype,
    attended_to,
    check_empty,
    new_cache,
    remembered,
    with_cache,
)
from ._common import as_attribute, merge_heads, split_heads
from ._house import House, HouseKeywords, house_signature
from ._sources import tokens, zero_absent


class CrossAttention(nnx.Module):
    """`out_proj(attend(q_proj(x), k_proj(memory), v_proj(memory)))`, N heads of width D / N.

    Without a memory x looks at itself, as in the other half of an encoder-decoder's layers:
    `mask=CAUSAL` then makes a decoder's self attention.

    Shapes: x `*B T in_features`, memory `*B S memory_features` -> `*B T in_features`.

    Args:
      in_features: width of a token of x, D.
      num_heads: how many heads; must divide in_features.
      memory_features: width of a token of the memory; None for in_features.
      key_bias: whether `k_proj` has a bias, as Bart's; Whisper's has none. The others have one.
      mask: what may look at what when a call gives no other; kept as `layer.mask`.
      dropout: share of the weights that is dropped in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None draws as torch does.
      rngs: source of the random start, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide in_features, a share outside [0, 1];
        in the call, if x, memory, masks or valid do not fit, for a missing memory whose width
        differs from x's, or another word for `empty`.
      TypeError: if x or memory are not floating, or a mask or valid not boolean.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3; names as in Bart's and
    Whisper's published checkpoints.

    >>> import jax.numpy as jnp
    >>> layer = CrossAttention(8, 2, memory_features=6, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 8)), jnp.ones((3, 7, 6))).shape
    (3, 5, 8)
    """

    @house_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        memory_features: int | None = None,
        key_bias: bool = True,
        mask: Mask | Array = FULL,
        **more: Unpack[HouseKeywords],
    ):
        memory_features = in_features if memory_features is None else memory_features
        check_positive(in_features=in_features, num_heads=num_heads)
        check_positive(memory_features=memory_features)
        self.head_dim = check_divides("num_heads", num_heads, "in_features", in_features)
        self.mask = as_attribute(as_mask(mask))
        house = House(**more)
        self.q_proj = house.linear(in_features, in_features)
        self.k_proj = house.linear(memory_features, in_features, use_bias=key_bias)
        self.v_proj = house.linear(memory_features, in_features)
        self.out_proj = house.linear(in_features, in_features)
        self.dropout = house.attention_dropout()

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        *,
        cache: None = None,
        **call: Unpack[CrossCall],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: M, **call: Unpack[CrossCall]
    ) -> tuple[Float[Array, "*B T D"], M]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S E"] | None = None,
        *,
        mask: Mask | Array | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | Memory | None = None,
    ) -> Any:
        """Attention of x over memory, or over itself.

        Args:
          x: the tokens.
          memory: what is looked at; None for x.
          mask: replaces the layer's; None is the layer's.
          valid: which tokens of x are there. The others are neither read nor, in self attention,
            seen, and their outputs are zero. A memory's padding is said by the mask.
          empty: what a token gives that may look at nothing: "zero", or "mean", as of
            `GroupedQueryAttention`.
          deterministic: overrules `train()` and `eval()`.
          cache: what `init_cache` or `remember` made; the call then gives y and the cache.
        """
        check_empty(empty, cache)
        widths = self.q_proj.in_features, self.k_proj.in_features
        x, memory, seen = tokens(x, memory, self.mask, mask, valid, widths, cache)
        q = split_heads(self.q_proj(x), self.head_dim)  # *B T N H
        drop = None if self.dropout is None else self.dropout(deterministic)
        how = {"mask": seen, "valid": valid, "dropout": drop, "empty": empty}
        o, cache = attended_to(q, memory, self.keys_and_values, cache, **how)  # *B T N H
        return with_cache(zero_absent(self.out_proj(merge_heads(o)), valid), cache)  # *B T D

    def keys_and_values(
        self, memory: Float[Array, "*B S E"]
    ) -> tuple[Float[Array, "*B S N H"], Float[Array, "*B S N H"]]:
        """What the layer makes of each token of a memory."""
        k, v = self.k_proj(memory), self.v_proj(memory)
        return split_heads(k, self.head_dim), split_heads(v, self.head_dim)

    def remember(
        self, memory: Float[Array, "*B S E"], valid: Bool[Array, "*#B S"] | None = None
    ) -> Memory:
        """Keys and values of a memory, made once: `y, cache = layer(x, cache=memory)` reads them.

        Args:
          memory: as of the call.
          valid: which of its tokens are there; the others are never seen.

        Raises:
          TypeError, ValueError: as the call does.
        """
        return remembered(memory, valid, self.k_proj.in_features, self.keys_and_values)

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache for self attention; arguments as of `GroupedQueryAttention.init_cache`."""
        sizes = (self.q_proj.out_features // self.head_dim, self.head_dim, self.head_dim)
        return new_cache(batch, length, sizes, self.mask, arithmetic_dtype(self.k_proj), options)
