"""Grouped-query attention with a gate before the output projection."""

from typing import Literal, Unpack, get_args

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_choice
from .._internal.types import wide
from ._common import split_heads
from ._init import LayerInit
from ._self_attention import DecodingHeads, Grouped, SelfAttention, Tokens, grouped_signature

Gate = Literal["head", "full"]
Activation = Literal["sigmoid", "softplus"]


class GatedQueryAttention(DecodingHeads, SelfAttention):
    """`o_proj(sigmoid(g_proj(x)) * attend(q_proj(x), k_proj(x), v_proj(x)))`.

    Also called: gated attention, attention with an output gate.

    Queries, keys and values are made as in `GroupedQueryAttention`, with norms and a rotary.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      gate: "full" for one number per component, "head" for one per head.
      fused: whether the gate is part of `q_proj`, which is then twice as wide and holds a query
        and its gate for each head (Qwen3-Next); else `g_proj` (Laguna).
      gate_bias: whether `g_proj` has a bias.
      activation: "sigmoid" or "softplus" (Laguna), of the gate.
      grouped: the keywords of `GroupedQueryAttention`, except `clip_qkv` and `o_norm`;
        `qkv_bias` applies to a fused gate too.

    Raises:
      ValueError: for another gate or activation, fused with gate="head" or gate_bias, and as
        `GroupedQueryAttention` does.
      TypeError: as `GroupedQueryAttention` does.

    Source: Qiu et al., "Gated Attention for Large Language Models: Non-linearity, Sparsity, and
    Attention-Sink-Free", 2025; names as in Qwen3-Next's and Laguna's published checkpoints.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = GatedQueryAttention(12, 6, 3, 4, fused=True, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 5, 12))
    >>> run = nnx.jit(GatedQueryAttention.__call__)  # layer(x), compiled
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
        gate: Gate = "full",
        fused: bool = False,
        activation: Activation = "sigmoid",
        gate_bias: bool = False,
        **grouped: Unpack[Grouped],
    ):
        check_choice("gate", gate, *get_args(Gate))
        check_choice("activation", activation, *get_args(Activation))
        if fused and gate != "full":
            raise ValueError(
                'fused=True is for gate="full", where a head of q_proj is a query and a gate of '
                f"equal width; got gate={gate!r}."
            )
        if fused and gate_bias:
            raise ValueError("gate_bias is of g_proj, which fused=True has not: say qkv_bias=True.")
        self.query_parts, self.activation = 2 if fused else 1, activation
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        width = num_heads * (head_dim if gate == "full" else 1)
        init = LayerInit.of(grouped)
        self.g_proj = None if fused else init.linear(in_features, width, use_bias=gate_bias)

    def project(self, tokens: Tokens) -> tuple[Array, Array, Array, Float[Array, "*B T N X"]]:
        """Queries, keys and values, and the gate of the heads."""
        q, gate = self.query_and_gate(tokens.x)  # *B T N H, *B T N H or 1
        q = self.norm_and_rotate(q, self.q_norm, tokens.positions)  # *B T N H
        return q, *self.keys_and_values(tokens), gate

    def combine(
        self, o: Float[Array, "*B T N H"], v: Array, rest: Float[Array, "*B T N X"]
    ) -> Float[Array, "*B T N H"]:
        """Attention output times the gate."""
        return rest.astype(o.dtype) * o

    def query_and_gate(
        self, x: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T N X"]]:
        """Queries, and the gate of the heads: X is H, or 1 with gate="head"."""
        q = split_heads(self.q_proj(x), self.head_dim * self.query_parts)  # *B T N H
        if self.g_proj is None:
            q, gate = jnp.split(q, 2, axis=-1)  # *B T N H
        else:
            parts = self.g_proj.out_features // q.shape[-2]
            gate = split_heads(self.g_proj(x), parts)  # *B T N X
        activation = nnx.sigmoid if self.activation == "sigmoid" else nnx.softplus
        return q, activation(gate.astype(wide(gate.dtype)))
