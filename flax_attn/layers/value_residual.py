"""Value residual attention: values are mixed with those of the first layer."""

from typing import Any, Unpack, overload

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_input
from ._cached import C, Call
from ._common import split_heads
from ._init import LayerInit, keywords_of
from ._self_attention import DecodingHeads, Grouped, SelfAttention, Tokens, grouped_signature


class ValueResidualAttention(DecodingHeads):
    """`o_proj(attend(q, k, first + mix * (v - first)))`, `first` the values of the first layer.

    Also called: value residual learning, ResFormer.

    Runs through `attend`. The first layer of a model is called without `values`, and the others
    with `values=first.values(x)`, where x is the input of the first layer.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      learned_mix: whether the mix of each token and key/value head is `sigmoid(mix_proj(x))`; if
        not, it is 0.5.
      grouped: the other arguments of `GroupedQueryAttention`, except `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, and if `values` are not `*B T K H`.
      TypeError: as in `GroupedQueryAttention`.

    Source: Zhou et al., "Value Residual Learning", 2024.

    >>> first, second = (ValueResidualAttention(12, 6, 3, 4, rngs=nnx.Rngs(i)) for i in (0, 1))
    >>> x = jnp.ones((2, 5, 12))
    >>> second(x + first(x), values=first.values(x)).shape
    (2, 5, 12)
    """

    @grouped_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        learned_mix: bool = False,
        **grouped: Unpack[Grouped],
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.mix_proj = (
            LayerInit.of(grouped).linear(in_features, num_kv_heads) if learned_mix else None
        )

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: None = None,
        values: Array | None = None,
        **call: Unpack[Call],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: C, values: Array | None = None, **c: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    @keywords_of(SelfAttention.__call__)
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        values: Float[Array, "*B T K H"] | None = None,
        **call: Any,
    ) -> Any:
        """Attention of x over itself; `values` are the first layer's, None if this is the first.

        The other arguments are as in `GroupedQueryAttention`.
        """
        tokens = self.tokens(x, **call)  # *B T D
        q, k, v, _ = self.project(tokens)  # *B T N H, *B T K H, *B T K H
        v = v if values is None else self._mixed(tokens, v, values)  # *B T K H
        o, cache = self.attention(q, k, v, tokens)  # *B T N H
        y = self.output(o, tokens)  # *B T D
        return y if cache is None else (y, cache)

    def values(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T K H"]:
        """The values of this layer, for the layers after it."""
        return split_heads(self.v_proj(check_input("x", x, self.v_proj.in_features)), self.head_dim)

    def _mixed(self, tokens: Tokens, v: Array, first: Array) -> Array:
        if jnp.shape(first) != v.shape:
            raise ValueError(f"values must be *B T K H = {v.shape}; got {jnp.shape(first)}.")
        mix = 0.5 if self.mix_proj is None else nnx.sigmoid(self.mix_proj(tokens.x))[..., None]
        if tokens.real is not None:
            first = jnp.where(tokens.real[..., None, None], first, 0)
        return first + mix * (v - first)
