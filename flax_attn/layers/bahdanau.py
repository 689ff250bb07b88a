"""Additive attention: a small network scores each encoder state (Bahdanau et al., 2015)."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_input, check_positive
from ..masks import FULL, Mask
from ._common import pool, visible_states, zero_masked_states
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class BahdanauAttention(Layer):
    """`context_t = sum_i softmax_i(v . tanh(W1 h_i + W2 s_t)) h_i`, without any scale.

    Also called: additive attention, MLP attention.

    Shapes: encoder states h `*B S d_encoder`, decoder states s `*B T d_decoder` ->
    `*B T d_encoder`. One decoder state at a time is T = 1.

    Args:
      d_encoder: width of an encoder state.
      d_decoder: width of a decoder state.
      units: width of the hidden layer.
      kernel_init: initializer of the projections; None for PyTorch's.
      bias_init: accepted by every layer; there is no bias.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)).
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, widths or batch axes that do not fit, a mask that does not
        broadcast.
      TypeError: if h or s is not floating, or the mask not boolean.

    Source: Bahdanau, Cho and Bengio, "Neural Machine Translation by Jointly Learning to Align and
    Translate", 2015, equations 5 and 6 and appendix A.1.2.

    >>> from flax import nnx
    >>> layer = BahdanauAttention(6, 4, 5, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 7, 6)), jnp.ones((2, 3, 4))).shape
    (2, 3, 6)
    """

    mask_is_of = "a token"

    @init_signature
    def __init__(
        self,
        d_encoder: int,
        d_decoder: int,
        units: int,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_encoder=d_encoder, d_decoder=d_decoder, units=units)
        linear = InitWithoutDropout(**more).linear
        self.W1 = linear(d_encoder, units, use_bias=False)
        self.W2 = linear(d_decoder, units, use_bias=False)
        self.v = linear(units, 1, use_bias=False)

    def __call__(
        self,
        h: Float[Array, "*B S d_encoder"],
        s: Float[Array, "*B T d_decoder"],
        *,
        mask: Mask | Array = FULL,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T d_encoder"]:
        """One context vector for each decoder state; the mask broadcasts to `*B 1 T S`.

        There is no dropout, so `deterministic` has no effect.
        """
        h = check_input("h", h, self.W1.in_features)
        s = check_input("s", s, self.W2.in_features)
        visible = visible_states(mask, h, s)  # *B T S
        h, s = zero_masked_states(h, s, visible)
        sums = self.W1(h)[..., None, :, :] + self.W2(s)[..., :, None, :]  # *B T S units
        logits = self.v(jnp.tanh(sums))[..., 0]  # *B T S
        return pool(logits, h, visible)
