"""The lightning indexer of DeepSeek sparse attention, which selects keys for each query."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import min_dim
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import vmap_leading
from .._internal.types import wide
from ..norms import LayerNorm
from ..sharding.rows import may_be_sharded
from ._common import split_heads
from ._self_attention import RotaryFn
from ._token_indices import RotaryPositions, rotate_by


class Indexer(nnx.Module):
    """Selects the top_k keys by `sum_h w_h relu(q_h . k)` for each query, for all heads at once.

    Args:
      linear: constructor of the projections.
      widths: width of the queries' input, and of a token.
      sizes: index_heads, index_dim and number of rotated components per head.
      top_k: number of keys per query.
      param_dtype: of the norm.
    """

    def __init__(
        self,
        linear: Callable[..., nnx.Linear],
        widths: tuple[int, int],
        sizes: tuple[int, int, int],
        top_k: int,
        param_dtype: Any,
    ):
        (latent, width), (heads, dim, self.rotary_dim) = widths, sizes
        self.heads, self.dim, self.top_k = heads, dim, top_k
        self.wq_b = linear(latent, heads * dim, use_bias=False)
        self.wk = linear(width, dim, use_bias=False)
        self.k_norm = LayerNorm(dim, eps=1e-6, use_bias=True, param_dtype=param_dtype)
        self.weights_proj = linear(width, heads, use_bias=False)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        latent: Float[Array, "*B T R"],
        k: Float[Array, "*B S H"],
        may: Bool[Array, "*B T S"],
        rotary: RotaryFn | None,
        positions: RotaryPositions,
    ) -> Bool[Array, "*B T S"]:
        """True for the keys selected for each query, among those where `may` is True."""
        q = self._rotate_first(
            split_heads(self.wq_b(latent), self.dim), rotary, positions
        )  # *B T I H
        q, k = (y.astype(wide(y.dtype)) for y in (q, k))
        scores = jnp.einsum("...tih,...sh->...its", q, k) * self.dim**-0.5
        weights = self.weights_proj(x).astype(scores.dtype) * self.heads**-0.5  # *B T I
        scores = jnp.einsum("...ti,...its->...ts", weights, nnx.relu(scores))  # *B T S
        scores = jnp.where(may, jax.lax.stop_gradient(scores), -jnp.inf)
        best = _top_keys(scores, min_dim(self.top_k, k.shape[-2]))  # *B T I
        # Indexing next to sharded batch axes requires a vmap over them.
        chosen = vmap_leading(partial(_scatter_true, length=k.shape[-2]), best.ndim - 1)
        return chosen(best) & may

    def keys(
        self, x: Float[Array, "*B T D"], rotary: RotaryFn | None, positions: RotaryPositions
    ) -> Float[Array, "*B T H"]:
        """One key per token."""
        return self._rotate_first(self.k_norm(self.wk(x)[..., None, :]), rotary, positions)[
            ..., 0, :
        ]

    def _rotate_first(self, x: Array, rotary: RotaryFn | None, positions: RotaryPositions) -> Array:
        """Rotates the first `rotary_dim` components of each head."""
        if rotary is None:
            return x
        first, rest = jnp.split(x, [self.rotary_dim], axis=-1)
        return jnp.concatenate([rotate_by(rotary, first, positions), rest], axis=-1)


def _top_keys(scores: Float[Array, "*B T S"], count: int) -> Int[Array, "*B T I"]:
    """Indices of the `count` highest scores of each query; ties go to the lower index.

    XLA gathers all rows for a `top_k`, so possibly sharded scores are sorted instead.
    """
    if not may_be_sharded(scores):
        return jax.lax.top_k(scores, count)[1]
    return jnp.argsort(scores, axis=-1, stable=True, descending=True)[..., :count]


def _scatter_true(best: Int[Array, " I"], length: int) -> Bool[Array, " S"]:
    """Boolean vector, True at these indices."""
    return jnp.zeros(length, bool).at[best].set(True)
