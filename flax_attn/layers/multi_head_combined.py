"""Multi-head causal attention with one projection for queries, keys and values."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_context, check_divides, check_input, check_positive, check_rate
from ..reference import softmax
from ..taps import tap
from ._dropout import LayerDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class MultiHeadAttentionCombined(Layer):
    """`MultiHeadAttention` with `q, k, v = split(qkv(x))`: one matrix product instead of three.

    The output of `qkv` has the layout [3, N, H]: all queries, then all keys, then all values, each
    by head. (GPT-NeoX and BLOOM use [N, 3, H].)

    Shapes: x `*B T d_in` -> `*B T d_out`, for any T up to `context_length`.

    Args:
      qkv_bias: whether the projection has a bias; `out_proj` always has one.
      d_in, d_out, context_length, dropout, num_heads, kernel_init, bias_init, rngs, dtype,
        param_dtype: as in `MultiHeadAttention`.

    Raises:
      ValueError, TypeError: as in `MultiHeadAttention`.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3, bonus material.

    >>> from flax import nnx
    >>> layer = MultiHeadAttentionCombined(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((6, 3))).shape
    (6, 2)
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
        check_positive(d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = check_divides("num_heads", num_heads, "d_out", d_out)
        self.context_length = context_length
        init = InitWithoutDropout(**more)
        self.qkv = init.linear(d_in, 3 * d_out, use_bias=qkv_bias)
        self.out_proj = init.linear(d_out, d_out)
        self.dropout = LayerDropout(check_rate("dropout", dropout), rngs=init.rngs)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The projected context vectors; `deterministic` overrides `train()` and `eval()`."""
        x = check_input("x", x, self.qkv.in_features)
        check_context(x.shape[-2], self.context_length)
        qkv = self.qkv(x).reshape(*x.shape[:-1], 3, self.num_heads, self.head_dim)  # *B T 3 N H
        q, k, v = jnp.moveaxis(qkv, (-3, -2), (0, -3))  # *B N T H each
        scores = q @ k.mT / self.head_dim**0.5  # *B N T T
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        weights = self.dropout(weights, deterministic=deterministic)
        context = tap("context", jnp.swapaxes(weights @ v, -3, -2))  # *B T N H
        return self.out_proj(context.reshape(*x.shape[:-1], self.d_out))
