"""Causal attention by softmax over all keys, then masking and renormalisation."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_context, check_input, check_positive, check_rate
from ..reference import softmax
from ..taps import tap
from ._dropout import LayerDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class CausalRenormalisedAttention(Layer):
    """`w = softmax(q k^T / sqrt(d_out))`, `w = tril(w)`, `dropout(w / sum(w)) v`.

    The softmax's denominator cancels, so this is `CausalAttention` in exact arithmetic, gradients
    included: nothing leaks from the future. They differ where all past weights underflow next to a
    much larger future score: that row is 0 / 0 and becomes NaN, here as in torch.

    Shapes: x `*B T d_in` -> context `*B T d_out`, for any T up to `context_length`.

    Args:
      dropout: dropout rate of the renormalised weights in training, from 0 to 1.
      d_in, d_out, context_length, qkv_bias, kernel_init, bias_init, rngs, dtype, param_dtype: as in
        `CausalAttention`.

    Raises:
      ValueError, TypeError: as in `CausalAttention`.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3.

    >>> from flax import nnx
    >>> layer = CausalRenormalisedAttention(3, 2, context_length=6, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 3))).shape
    (5, 2)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float = 0.0,
        qkv_bias: bool = False,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out, context_length=context_length)
        self.d_out = d_out
        self.context_length = context_length
        init = InitWithoutDropout(**more)
        self.W_query = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_key = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_value = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.dropout = LayerDropout(check_rate("dropout", dropout), rngs=init.rngs)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The context vectors; `deterministic` overrides `train()` and `eval()`."""
        x = check_input("x", x, self.W_query.in_features)
        check_context(x.shape[-2], self.context_length)
        q = self.W_query(x)  # *B T d_out
        k = self.W_key(x)  # *B T d_out
        v = self.W_value(x)  # *B T d_out
        scores = tap("scores", q @ k.mT / self.d_out**0.5)  # *B T T
        weights = jnp.tril(tap("weights", softmax(scores)))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        weights = tap("weights_renormalised", weights)
        weights = self.dropout(weights, deterministic=deterministic)
        return tap("context", weights @ v)  # *B T d_out
