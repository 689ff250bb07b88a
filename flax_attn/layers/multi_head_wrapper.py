"""Multi-head attention as a concatenation of single-head causal attentions."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_positive
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer
from .causal_attention import CausalAttention


class MultiHeadAttentionWrapper(Layer):
    """`concat(heads[0](x), ..., heads[N - 1](x))`, each head a separate `CausalAttention`.

    Shapes: x `*B T d_in` -> context `*B T D` with `D = num_heads * d_out`: here d_out is the width
    of one head.

    Args:
      d_out: width of one head.
      num_heads: number of heads.
      d_in, context_length, dropout, qkv_bias, kernel_init, bias_init, rngs, dtype, param_dtype: as
        of `CausalAttention`.

    Raises:
      ValueError: as in `CausalAttention`, and for a num_heads below 1.
      TypeError: if x is not floating.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3.

    >>> layer = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((6, 3))).shape
    (6, 4)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        **more: Unpack[InitKeywords],
    ):
        check_positive(num_heads=num_heads)
        InitWithoutDropout(**more)  # raises TypeError for `dropout` and unknown keywords
        arguments = (d_in, d_out, context_length, dropout, qkv_bias)
        heads = (CausalAttention(*arguments, **more) for _ in range(num_heads))
        self.heads = nnx.List(heads)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T D"]:
        """The heads' context vectors, joined; `deterministic` overrides `train()` and `eval()`."""
        contexts = [head(x, deterministic=deterministic) for head in self.heads]
        return jnp.concatenate(contexts, axis=-1)  # *B T (N d_out)
