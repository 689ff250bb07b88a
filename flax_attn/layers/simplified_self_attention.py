"""Self-attention without parameters: tokens are queries, keys and values."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Initializer
from jaxtyping import Array, Float

from .._internal.checks import check_choice, check_input
from ..reference import softmax
from ..taps import tap
from ._layer import Layer


class SimplifiedSelfAttention(Layer):
    """`softmax(x x^T) x`: no parameters, no scale, no mask.

    Shapes: x `*B T D` -> context `*B T D`.

    Args:
      normalise: normalisation of a row of scores: `"softmax"`, or `"sum"`, which divides by the
        row's sum and requires sums away from zero.
      kernel_init, bias_init, rngs, dtype, param_dtype: as in `UniformCausalAverage`.

    Raises:
      ValueError: for another `normalise`, or if x has fewer than two axes.
      TypeError: if x is not floating.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3.

    >>> from flax import nnx
    >>> SimplifiedSelfAttention(rngs=nnx.Rngs(0))(jnp.ones((6, 3))).shape
    (6, 3)
    """

    def __init__(
        self,
        *,
        normalise: str = "softmax",
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_choice("normalise", normalise, "softmax", "sum")
        self.normalise = normalise
        self.dtype = dtype

    def __call__(
        self, x: Float[Array, "*B T D"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T D"]:
        """The context vectors. There is no dropout, so `deterministic` has no effect."""
        (x,) = promote_dtype((check_input("x", x),), dtype=self.dtype)
        scores = tap("scores", x @ x.mT)  # *B T T
        if self.normalise == "softmax":
            weights = softmax(scores)
        else:
            weights = scores / scores.sum(axis=-1, keepdims=True)
        return tap("context", tap("weights", weights) @ x)  # *B T D
