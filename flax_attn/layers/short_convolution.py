"""A short convolution between two gates, which replaces most attention layers in LFM2."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_positive
from ..taps import tap
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._recurrent import Recurred, Recurrent, Shape, Tokens, short_convolution, state_of


class GatedShortConvolution(Recurrent):
    """`out_proj(C * conv(B * x'))`, where `in_proj(x)` is B, C and x' concatenated.

    Also called: short convolution (short conv), LFM2's convolution block.

    The convolution is causal and depthwise.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      conv_size: kernel size of the convolution, in tokens.
      use_bias: whether projections and convolution have biases.
      kernel_init, bias_init: initializers of projections and convolution; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)).
      dtype: of the projections; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1.
      TypeError: in the call, if x is not floating.

    Source: Liquid AI, "LFM2 Technical Report", 2025; names as in LFM2's published checkpoints.

    >>> from flax import nnx
    >>> layer = GatedShortConvolution(12, conv_size=3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 7, 12))).shape
    (2, 7, 12)
    """

    @init_signature
    def __init__(
        self,
        in_features: int,
        *,
        conv_size: int = 3,
        use_bias: bool = False,
        **more: Unpack[InitKeywords],
    ):
        check_positive(in_features=in_features, conv_size=conv_size)
        init = InitWithoutDropout(**more)
        self.in_proj = init.linear(in_features, 3 * in_features, use_bias=use_bias)
        self.conv = short_convolution(in_features, conv_size, use_bias, init)
        self.out_proj = init.linear(in_features, in_features, use_bias=use_bias)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `out_proj`."""
        b, c, x = jnp.split(self.in_proj(x), 3, axis=-1)  # *B T D each
        x, conv_state = tokens.convolved(self.conv, b * x)  # *B T D
        return tap("context", c * x), None, conv_state

    def state_shapes(self) -> tuple[Shape, Shape]:
        """No recurrent state, and the past tokens of the convolution."""
        return None, state_of(self.conv)
