"""A short convolution between two gates: what LFM2 has in place of most of its attention."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_positive
from ..cache import State
from ..taps import tap
from ._cached import arithmetic_dtype
from ._common import torch_linears
from ._recurrent import convolved, empty_state, entered, left, short_convolution


class GatedShortConvolution(nnx.Module):
    """`out_proj(C * conv(B * x'))`, where `in_proj(x)` is B, C and x' beside each other.

    The convolution is causal, and of each component by itself.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      conv_size: how many tokens the convolution sees.
      use_bias: whether projections and convolution have one.
      kernel_init, bias_init: initializers of projections and convolution; None draws as torch does.
      rngs: source of the random start, torch's U(+-1 / sqrt(width in)).
      dtype: of the projections; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1.
      TypeError: in the call, if x is not floating.

    Source: Liquid AI, "LFM2 Technical Report", 2025; names as in LFM2's published checkpoints.

    >>> layer = GatedShortConvolution(12, conv_size=3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 7, 12))).shape
    (2, 7, 12)
    """

    def __init__(
        self,
        in_features: int,
        *,
        conv_size: int = 3,
        use_bias: bool = False,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_positive(in_features=in_features, conv_size=conv_size)
        start = kernel_init, bias_init, dtype, param_dtype, rngs
        linear = torch_linears(*start)
        self.in_proj = linear(in_features, 3 * in_features, use_bias=use_bias)
        self.conv = short_convolution(in_features, conv_size, use_bias, *start)
        self.out_proj = linear(in_features, in_features, use_bias=use_bias)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        segments: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        cache: State | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"] | tuple[Float[Array, "*B T D"], State]:
        """The outputs of all tokens, and with a cache the state after them.

        There is no dropout, so `deterministic` changes nothing. Arguments as of
        `GatedDeltaAttention`.
        """
        x = entered(x, self.in_proj.in_features, valid, cache)
        b, c, x = jnp.split(self.in_proj(x), 3, axis=-1)  # *B T D each
        x, near = convolved(self.conv, b * x, cache, segments, valid)
        y = self.out_proj(tap("context", c * x))
        return left(y, valid, cache, None, near)  # *B T D

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        layers: int | None = None,
        dtype: Any = None,
    ) -> State:
        """The `State` before the first token; arguments as of a cache of attention."""
        dtype = dtype or arithmetic_dtype(self.out_proj)
        near = (self.conv.kernel.shape[0] - 1, self.conv.out_features)
        return empty_state(batch, length, layers, dtype, recurrent=None, convolution=near)
