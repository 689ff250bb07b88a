"""Sigmoid attention: each key weighs by its own score, without a softmax over the others."""

import math
from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..by_weights import attend_by_weights
from ..masks import Mask
from ..normalisers import sigmoid
from ..scores import Additive
from ._grouped import Grouped, GroupedHeads, check_no_sinks, grouped_signature


class SigmoidAttention(GroupedHeads):
    """`o_proj(sigmoid(scale * q.k + logit_bias) . v)`, in the place of a softmax.

    The weights of a row have any sum. The paper's bias of -log S starts them near a sum of one; S
    is the number of keys given, hidden ones included. Holds all weights, T x S a head.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as of `GroupedQueryAttention`.
      logit_bias: a number added to the scores; None for -log S, 0.0 for the plain sigmoid.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`.

    Raises:
      ValueError: as of `GroupedQueryAttention`, and for sinks.
      TypeError: as of `GroupedQueryAttention`.

    Source: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
    2024.

    >>> from flax import nnx
    >>> layer = SigmoidAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    @grouped_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        logit_bias: float | None = None,
        **grouped: Unpack[Grouped],
    ):
        check_no_sinks("SigmoidAttention", grouped)
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.logit_bias = logit_bias

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself; arguments as of `GroupedQueryAttention`."""
        x, seen = self.tokens(x, mask, valid)
        q, k, v = self.heads(x, positions)  # *B T N H, *B T K H, *B T K H
        bias = -math.log(max(x.shape[-2], 1)) if self.logit_bias is None else self.logit_bias
        how = self.how_by_weights(deterministic)
        how["score"] >>= Additive(jnp.full((1, 1, 1), bias, q.dtype))
        o = attend_by_weights(q, k, v, normalise=sigmoid, mask=seen, **how)  # *B T N H
        return self.output(o, valid)  # *B T D
