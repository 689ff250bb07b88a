"""Grouped-query attention: N query heads share K key/value heads (Ainslie et al., 2023)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .._checks import check_divides, check_input, check_positive
from ..attend import attend
from ..heads import merge_heads, split_heads
from ..masks import CAUSAL, Mask
from ..projection import torch_linear

Norm = Callable[[jax.Array], jax.Array]
Turn = Callable[[jax.Array, jax.Array | None], jax.Array]


class GroupedQueryAttention(nnx.Module):
    """`o_proj(attend(rotary(q_norm(q_proj(x))), rotary(k_norm(k_proj(x))), v_proj(x)))`.

    Query head n reads key/value head n // (N / K): K = N is multi-head, K = 1 multi-query.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: query heads, N.
      num_kv_heads: key/value heads, K; must divide N.
      head_dim: width of a head, H; N * H need not be in_features.
      rotary: a `Rotary`, or anything called as `rotary(x, positions)` on `*B T N H`; None for none.
      q_norm, k_norm: a norm over the last axis of `*B T N H` before the rotation, such as
        `nnx.RMSNorm(head_dim, epsilon=1e-6, rngs=rngs)`; None for none.
      rngs: source of the random start, torch's U(+-1 / sqrt(width in)).
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, K that does not divide N, or if x is not `*B T in_features`.
      TypeError: if x is not floating, or the mask not boolean.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023; names
    as in Llama's published checkpoints.

    >>> layer = GroupedQueryAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rotary: Turn | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_positive(head_dim=head_dim)
        check_divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        types = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.head_dim, self.rotary = head_dim, rotary
        self.q_norm, self.k_norm = q_norm, k_norm
        self.q_proj = torch_linear(in_features, num_heads * head_dim, **types)
        self.k_proj = torch_linear(in_features, num_kv_heads * head_dim, **types)
        self.v_proj = torch_linear(in_features, num_kv_heads * head_dim, **types)
        self.o_proj = torch_linear(num_heads * head_dim, in_features, **types)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array = CAUSAL,
        positions: Int[Array, "*#B T"] | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself; `positions` are 0 ... T - 1 unless given."""
        x = check_input("x", x, self.q_proj.in_features)
        q = self._placed(self.q_proj(x), self.q_norm, positions)  # *B T N H
        k = self._placed(self.k_proj(x), self.k_norm, positions)  # *B T K H
        v = split_heads(self.v_proj(x), self.head_dim)  # *B T K H
        o = attend(q, k, v, mask=mask)  # *B T N H
        return self.o_proj(merge_heads(o))  # *B T D

    def _placed(self, x: jax.Array, norm: Norm | None, positions: Any) -> jax.Array:
        """Heads, normed and turned by their positions where the layer has a norm and a rotary."""
        x = split_heads(x, self.head_dim)
        x = x if norm is None else norm(x)
        return x if self.rotary is None else self.rotary(x, positions)
