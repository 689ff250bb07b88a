"""Self-attention with three Linear layers."""

from typing import Unpack

from jaxtyping import Array, Float

from .._internal.checks import check_input, check_positive
from ..reference import softmax
from ..taps import tap
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class SelfAttentionV2(Layer):
    """`softmax(q k^T / sqrt(d_out)) v` with `q, k, v = W_query(x), W_key(x), W_value(x)`.

    Also called: scaled dot-product attention, self-attention with one head.

    Shapes: x `*B T d_in` -> context `*B T d_out`.

    Args:
      d_in, d_out: widths of a token and of its query, key and value.
      qkv_bias: whether the three projections have biases.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(d_in)).
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for widths below 1, or if x is not `*B T d_in`.
      TypeError: if x is not floating.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3; the equation is
    that of Vaswani et al., "Attention Is All You Need", 2017.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> SelfAttentionV2(3, 2, rngs=nnx.Rngs(0))(jnp.ones((6, 3))).shape
    (6, 2)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        qkv_bias: bool = False,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out)
        self.d_out = d_out
        linear = InitWithoutDropout(**more).linear
        self.W_query = linear(d_in, d_out, use_bias=qkv_bias)
        self.W_key = linear(d_in, d_out, use_bias=qkv_bias)
        self.W_value = linear(d_in, d_out, use_bias=qkv_bias)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The context vectors. There is no dropout, so `deterministic` has no effect."""
        x = check_input("x", x, self.W_query.in_features)
        q = self.W_query(x)  # *B T d_out
        k = self.W_key(x)  # *B T d_out
        v = self.W_value(x)  # *B T d_out
        scores = tap("scores", q @ k.mT / self.d_out**0.5)  # *B T T
        weights = tap("weights", softmax(scores))
        return tap("context", weights @ v)  # *B T d_out
