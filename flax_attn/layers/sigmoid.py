"""Sigmoid attention: a sigmoid of each score instead of a softmax over keys."""

import math
from typing import Any, Unpack

import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from .._internal.types import wide
from ..by_weights import attend_by_weights
from ..normalisers import sigmoid
from ..positions.lengths import lengths_of
from ..scores import Additive
from ._self_attention import Grouped, grouped_signature
from ._token_indices import Documents
from ._weights import WeightsAttention


class SigmoidAttention(WeightsAttention):
    """`o_proj(sigmoid(scale * q.k + logit_bias) . v)`, without a softmax.

    Also called: sigmoid self-attention, SigmoidAttn.

    The weights of a row may have any sum. The paper's bias of -log S starts them near a sum of one;
    S is the number of keys, masked ones included and padding excluded, and with `Segments` in the
    mask the length of the token's document.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      logit_bias: a number added to the scores; None for -log S, 0.0 for the plain sigmoid.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`,
        `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, and for sinks.
      TypeError: as in `GroupedQueryAttention`.

    Source: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
    2024.

    >>> from flax import nnx
    >>> from flax_attn import Window
    >>> layer = SigmoidAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12)), mask=Window(2, 0)).shape  # a token and the two before it
    (2, 5, 12)
    """

    reads_documents = True

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
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.logit_bias = logit_bias

    def read(
        self, q: Array, k: Array, v: Array, *, documents: Documents, **attend_kwargs: Any
    ) -> Float[Array, "*B T N H"]:
        """Attention with elementwise sigmoid weights."""
        bias = self.logit_bias
        if bias is None and documents.is_unpacked:
            bias = _start_bias(q.shape[-3], wide(q.dtype))
        if bias is None:
            counts = lengths_of(None, q.shape[:-2], *documents)  # *B T
            bias = -jnp.log(counts.astype(q.dtype))[..., None, :, None]  # *B 1 T 1
        attend_kwargs["score"] >>= Additive(
            jnp.asarray(bias, q.dtype).reshape(jnp.shape(bias) or (1, 1, 1))
        )
        return attend_by_weights(q, k, v, normalise=sigmoid, **attend_kwargs)


def _start_bias(length: Any, dtype: Any) -> Any:
    """`-log S`: a float, or an array if the length is symbolic in `jax.export`."""
    if is_symbolic_dim(length):
        return -jnp.log(jnp.asarray(length, dtype))
    return -math.log(max(length, 1))
