"""Exclusive self attention: removes the component along the token's own value."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.arrays import aligned
from ..norms import l2_norm
from ._init import LayerInit
from ._self_attention import DecodingHeads, Grouped, SelfAttention, Tokens, grouped_signature


def remove_value_component(
    o: Float[Array, "*B T N H"], v: Float[Array, "*B T K H"], share: Float[Array, " N"]
) -> Float[Array, "*B T N H"]:
    """`o - share * (o . u) u`, u the unit vector of the token's value; head n uses v n // G."""
    u = jnp.repeat(l2_norm(v, eps=1e-12, floor=True), o.shape[-2] // v.shape[-2], axis=-2)
    along = jnp.sum(o * u, axis=-1, keepdims=True)  # *B T N 1
    return o - aligned(share[:, None], o) * along * u


class ExclusiveAttention(DecodingHeads, SelfAttention):
    """`o_proj(gate * (o - tanh(alpha) (o . u) u))`, `o = attend(q, k, v)`, `u = v / |v|`.

    Also called: exclusive self-attention (XSA).

    The component of a token's output along its own value is scaled by `1 - tanh(alpha)`, with one
    alpha per head. Runs through `attend`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      learned: whether `alpha` is trained, from zero, one per query head; if not, the component is
        removed entirely.
      gate: whether `sigmoid(gate_proj(x))` multiplies the input of `o_proj`.
      grouped: the other arguments of `GroupedQueryAttention`, except `clip_qkv` and `o_norm`.

    Raises:
      ValueError, TypeError: as in `GroupedQueryAttention`.

    Source: the attention of NeoMME in transformers.

    >>> layer = ExclusiveAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 12))
    >>> run = nnx.jit(ExclusiveAttention.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(5)[None] < jnp.asarray([[5], [3]])).shape  # padding behind
    (2, 5, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    @grouped_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        learned: bool = True,
        gate: bool = False,
        **grouped: Unpack[Grouped],
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        start = jnp.zeros(num_heads, grouped.get("param_dtype", jnp.float32))
        self.alpha = nnx.Param(start) if learned else None
        wide = num_heads * head_dim
        linear = LayerInit.of(grouped).linear
        self.gate_proj = linear(in_features, wide, use_bias=False) if gate else None

    def project(self, tokens: Tokens) -> tuple[Array, Array, Array, tuple[Array | None]]:
        """Queries, keys and values, and the gate of the heads, if there is one."""
        gate = None if self.gate_proj is None else nnx.sigmoid(self.gate_proj(tokens.x))
        q, k, v, _ = super().project(tokens)
        return q, k, v, (gate,)  # *B T (N H)

    def combine(
        self, o: Float[Array, "*B T N H"], v: Float[Array, "*B T K H"], rest: tuple[Array | None]
    ) -> Float[Array, "*B T N H"]:
        """Attention output without the component along the token's own value; gated."""
        one, (gate,) = jnp.ones(o.shape[-2], o.dtype), rest
        o = remove_value_component(o, v, one if self.alpha is None else jnp.tanh(self.alpha[...]))
        return o if gate is None else o * gate.reshape(o.shape)
