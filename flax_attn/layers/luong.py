"""Multiplicative attention between decoder and encoder states (Luong et al., 2015)."""

from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_choice, check_input, check_positive
from ..masks import FULL, Mask
from ._common import pool, visible_states, zero_masked_states
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


def dot(layer: "LuongAttention", h: jax.Array, s: jax.Array) -> jax.Array:
    """`s_t . h_i`, `*B T S`."""
    return s @ h.mT


def general(layer: "LuongAttention", h: jax.Array, s: jax.Array) -> jax.Array:
    """`s_t . W h_i`, `*B T S`."""
    return s @ layer.W(h).mT


def concat(layer: "LuongAttention", h: jax.Array, s: jax.Array) -> jax.Array:
    """`v . tanh(W [s_t; h_i])`, `*B T S`."""
    T, S = s.shape[-2], h.shape[-2]
    lead = (*h.shape[:-2], T, S)
    both = (
        jnp.broadcast_to(s[..., :, None, :], (*lead, s.shape[-1])),
        jnp.broadcast_to(h[..., None, :, :], (*lead, h.shape[-1])),
    )
    return layer.v(jnp.tanh(layer.W(jnp.concatenate(both, axis=-1))))[..., 0]


SCORES = {"dot": dot, "general": general, "concat": concat}


class LuongAttention(Layer):
    """`context_t = sum_i softmax_i(score(s_t, h_i)) h_i`, without any scale.

    Also called: multiplicative attention, dot-product attention, global attention.

    score is `s . h` ("dot"), `s . W h` ("general") or `v . tanh(W [s; h])` ("concat").

    Shapes: encoder states h `*B S d_encoder`, decoder states s `*B T d_decoder` ->
    `*B T d_encoder`. One decoder state at a time is T = 1.

    Args:
      d_encoder: width of an encoder state.
      d_decoder: width of a decoder state; equal to d_encoder for "dot".
      score: "dot", "general" or "concat".
      units: width of the hidden layer of "concat"; None for other scores.
      kernel_init, bias_init, rngs, dtype, param_dtype: as in `BahdanauAttention`.

    Raises:
      ValueError: for an unknown score, units without "concat" or "concat" without units,
        widths that differ under "dot", sizes that do not fit.
      TypeError: if h or s is not floating, or the mask not boolean.

    Source: Luong, Pham and Manning, "Effective Approaches to Attention-based Neural Machine
    Translation", 2015, section 3.1.

    >>> from flax import nnx
    >>> layer = LuongAttention(6, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 7, 6)), jnp.ones((2, 3, 4))).shape
    (2, 3, 6)
    """

    mask_is_of = "a token"

    @init_signature
    def __init__(
        self,
        d_encoder: int,
        d_decoder: int,
        *,
        score: Literal["dot", "general", "concat"] = "general",
        units: int | None = None,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_encoder=d_encoder, d_decoder=d_decoder)
        check_choice("score", score, *SCORES)
        _check_sizes(score, d_encoder, d_decoder, units)
        init = InitWithoutDropout(**more)
        self.score, self.dtype = score, init.dtype
        self.d_encoder, self.d_decoder = d_encoder, d_decoder
        if score == "general":
            self.W = init.linear(d_encoder, d_decoder, use_bias=False)
        if units is not None:
            self.W = init.linear(d_decoder + d_encoder, units, use_bias=False)
            self.v = init.linear(units, 1, use_bias=False)

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
        h, s = check_input("h", h, self.d_encoder), check_input("s", s, self.d_decoder)
        h, s = (x.astype(self.dtype or x.dtype) for x in (h, s))
        visible = visible_states(mask, h, s)  # *B T S
        h, s = zero_masked_states(h, s, visible)
        return pool(SCORES[self.score](self, h, s), h, visible)


def _check_sizes(score: str, d_encoder: int, d_decoder: int, units: int | None) -> None:
    if score == "dot" and d_decoder != d_encoder:
        raise ValueError(
            f'score="dot" needs states of one width; got {d_encoder=}, {d_decoder=}. '
            'score="general" maps one onto the other.'
        )
    if (score == "concat") != (units is not None):
        raise ValueError(f'units goes with score="concat" and only there; got {score=}, {units=}.')
    if units is not None:
        check_positive(units=units)
