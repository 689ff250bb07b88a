"""Entmax attention: weights that are zero where a score lies far below the largest."""

from functools import partial
from typing import Unpack

from jaxtyping import Array, Bool, Float, Int

from .._checks import check_choice
from ..by_weights import attend_by_weights
from ..masks import Mask
from ..normalisers import entmax
from ._grouped import Grouped, GroupedHeads, check_no_sinks, grouped_signature


class EntmaxAttention(GroupedHeads):
    """`o_proj(entmax(scale * q.k) . v)`: sparse weights that sum to one.

    Holds all weights, T x S a head, since a row's threshold needs its scores in order.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as of `GroupedQueryAttention`.
      alpha: 1.5 for entmax, 2 for sparsemax, whose weights are sparser.
      grouped: the other arguments of `GroupedQueryAttention`, except `sinks`.

    Raises:
      ValueError: as of `GroupedQueryAttention`, for another alpha, and for sinks.
      TypeError: as of `GroupedQueryAttention`.

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
        check_no_sinks("EntmaxAttention", grouped)
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.alpha = alpha

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
        how = {"normalise": partial(entmax, alpha=self.alpha), "mask": seen}
        o = attend_by_weights(q, k, v, **how, **self.how_by_weights(deterministic))  # *B T N H
        return self.output(o, valid)  # *B T D
