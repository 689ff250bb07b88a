"""One head of causal attention with unscaled scores."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_input, check_positive
from ..reference import softmax
from ..taps import tap
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class SingleHeadAttention(Layer):
    """`softmax(q k^T, future at -inf) v`, with projections without biases.

    Shapes: x `*B T d_in` -> context `*B T head_size`, or `*B T d_in` with `value=False`.

    Args:
      d_in: width of a token.
      head_size: width of a query, key and value.
      scale: whether the scores are divided by sqrt(head_size); never by the width of a token.
      value: whether there is a value projection; without one the values are x.
      bias_init: accepted by every layer; there is no bias.
      kernel_init, rngs, dtype, param_dtype: as in `SelfAttentionV2`.

    Raises:
      ValueError, TypeError: as in `SelfAttentionV2`.

    Source: Karpathy, "Let's build GPT: from scratch, in code, spelled out", 2023.

    >>> from flax import nnx
    >>> SingleHeadAttention(32, 16, rngs=nnx.Rngs(0))(jnp.ones((4, 8, 32))).shape
    (4, 8, 16)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        head_size: int,
        *,
        scale: bool = False,
        value: bool = True,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, head_size=head_size)
        self.scale = head_size**-0.5 if scale else 1.0
        linear = InitWithoutDropout(**more).linear
        self.key = linear(d_in, head_size, use_bias=False)
        self.query = linear(d_in, head_size, use_bias=False)
        self.value = linear(d_in, head_size, use_bias=False) if value else None

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T h"]:
        """The context vectors. There is no dropout, so `deterministic` has no effect."""
        x = check_input("x", x, self.key.in_features)
        k = self.key(x)  # *B T H
        q = self.query(x)  # *B T H
        v = x.astype(q.dtype) if self.value is None else self.value(x)  # *B T h
        scores = q @ k.mT * self.scale  # *B T T
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        return tap("context", weights @ v)  # *B T h
