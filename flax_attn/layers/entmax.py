"""Entmax attention: weights that are zero where a score lies far below the largest."""

from functools import partial
from typing import Any, Unpack

from jaxtyping import Array, Float

from .._internal.checks import check_choice
from ..by_weights import attend_by_weights
from ..normalisers import entmax
from ._self_attention import Grouped, grouped_signature
from ._weights import WeightsAttention


class EntmaxAttention(WeightsAttention):
    """`o_proj(entmax(scale * q.k) . v)`: sparse weights that sum to one.

    Also called: alpha-entmax attention; sparsemax attention with an alpha of 2.

    Each row of scores is sorted to find its threshold.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      alpha: 1.5 for entmax, 2 for sparsemax, whose weights are sparser.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`,
        `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, for another alpha, and for sinks.
      TypeError: as in `GroupedQueryAttention`.

    Source: Correia, Niculae and Martins, "Adaptively Sparse Transformers", 2019.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = EntmaxAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
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
        alpha: float | int = 1.5,
        **grouped: Unpack[Grouped],
    ):
        check_choice("alpha", alpha, 1.5, 2)
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.alpha = alpha

    def read(self, q: Array, k: Array, v: Array, **attend_kwargs: Any) -> Float[Array, "*B T N H"]:
        """Attention with sparse weights that sum to one."""
        return attend_by_weights(
            q, k, v, normalise=partial(entmax, alpha=self.alpha), **attend_kwargs
        )
