"""Causal attention with equal weights: the running mean of the tokens."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Initializer
from jaxtyping import Array, Float

from .._internal.checks import check_input
from ..reference import softmax
from ..taps import tap
from ._layer import Layer


class UniformCausalAverage(Layer):
    """`softmax(0, future at -inf) x`: row t is the mean of tokens 0 to t.

    Shapes: x `*B T D` -> context `*B T D`. All batch entries share one `T T` array of weights.

    Args:
      kernel_init, bias_init, rngs, param_dtype: accepted by every layer; there are no weights.
      dtype: of the arithmetic; None keeps that of x.

    Raises:
      ValueError: if x has fewer than two axes.
      TypeError: if x is not floating.

    Source: Karpathy, "Let's build GPT: from scratch, in code, spelled out", 2023.

    >>> UniformCausalAverage()(jnp.asarray([[2.0], [4.0], [9.0]])).tolist()
    [[2.0], [3.0], [5.0]]
    """

    def __init__(
        self,
        *,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*B T D"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T D"]:
        """The running means. There is no dropout, so `deterministic` has no effect."""
        (x,) = promote_dtype((check_input("x", x),), dtype=self.dtype)
        scores = jnp.zeros((x.shape[-2], x.shape[-2]), x.dtype)  # T T
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        return tap("context", weights @ x)  # *B T D
