"""Shared by layers with latent keys and values: a constructor, and the latent projections.

Each token has one latent of width L, from which the keys and values of all heads are computed, and
one key of width rotary_dim that all heads share. Only this key is rotated by its position.
"""

from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from .._internal.checks import check_positive
from ..masks import CAUSAL, Mask
from ..norms import RMSNorm
from ..rules import Rules
from ._cached import kernel_of
from ._common import split_heads
from ._init import LayerInit, LayerInitKeywords, keywords_of, layer_init_signature
from ._self_attention import Heads, RotaryFn, Tokens
from ._token_indices import RotaryPositions, rotate_by


class Latent(LayerInitKeywords, total=False):
    """Keyword arguments of `LatentHeads`, for layers that forward them."""

    q_rank: int | None
    rotary: RotaryFn | None
    mask: Mask | Array
    rules: Rules
    absorbed: bool
    qkv_bias: bool
    out_bias: bool


class LatentHeads(Heads):
    """Base of layers with latent keys and values; subclasses add the forward pass.

    Arguments are those of `LatentAttention`.
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        kv_rank: int,
        nope_dim: int,
        rotary_dim: int,
        value_dim: int,
        *,
        q_rank: int | None = None,
        rotary: RotaryFn | None = None,
        mask: Mask | Array = CAUSAL,
        rules: Rules = Rules(),  # noqa: B008
        absorbed: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
        **more: Unpack[LayerInitKeywords],
    ):
        _check_sizes(in_features, num_heads, kv_rank, nope_dim, rotary_dim, value_dim, q_rank)
        self.set_rules(rotary, mask, rules)
        self.nope_dim, self.rotary_dim, self.absorbed = nope_dim, rotary_dim, absorbed
        init = LayerInit(**more)
        norm = partial(RMSNorm, eps=1e-6, cast="before", param_dtype=init.param_dtype)
        self.low_rank_queries, q_width = q_rank is not None, num_heads * (nope_dim + rotary_dim)
        if q_rank is None:
            self.q_proj = init.linear(in_features, q_width, use_bias=False)
        else:
            self.q_a_proj = init.linear(in_features, q_rank, use_bias=qkv_bias)
            self.q_a_layernorm, self.q_b_proj = norm(q_rank), init.linear(q_rank, q_width, False)
        self.kv_a_proj_with_mqa = init.linear(in_features, kv_rank + rotary_dim, use_bias=qkv_bias)
        self.kv_a_layernorm = norm(kv_rank)
        self.kv_b_proj = init.linear(kv_rank, num_heads * (nope_dim + value_dim), use_bias=False)
        self.o_proj = init.linear(num_heads * value_dim, in_features, use_bias=out_bias)
        self.dropout = init.attention_dropout()

    def project(
        self, tokens: Tokens
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Any, bool]:
        """Queries, keys and values, and whether they are absorbed, as beside a cache.

        A cache stores keys alone, which contain the values.
        """
        cached = tokens.cache is not None
        absorbed = self.absorbed or cached
        q = self.queries(self.q_latent(tokens.x), tokens.positions)  # *B T N M, *B T N P
        kv = self.kv_latent(tokens.x, tokens.positions)  # *B T L, *B T 1 P
        q, k, v = self.heads(q, kv, absorbed)
        return q, k, None if cached else v, absorbed

    def combine(self, o: Float[Array, "*B T N L"], v: Any, rest: bool) -> Float[Array, "*B T N h"]:
        """Maps o to value heads; in the absorbed form `sum a (W c) = W sum a c`.

        Components after the first L, which a cache stores with the latent, are dropped.
        """
        if not rest:
            return o
        o, to_value = self._with_kernel(o, slice(self.nope_dim, None))
        return jnp.einsum("...nl,lnh->...nh", o[..., : to_value.shape[0]], to_value)

    def q_latent(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T R"]:
        """Input of the queries: x itself, or its normalised projection to q_rank."""
        return self.q_a_layernorm(self.q_a_proj(x)) if self.low_rank_queries else x

    def queries(
        self, latent: Float[Array, "*B T R"], positions: RotaryPositions
    ) -> tuple[Float[Array, "*B T N M"], Float[Array, "*B T N P"]]:
        """Queries in two parts; the second is rotated."""
        project = self.q_b_proj if self.low_rank_queries else self.q_proj
        q = split_heads(project(latent), self.nope_dim + self.rotary_dim)  # *B T N (M P)
        plain, rest = jnp.split(q, [self.nope_dim], axis=-1)
        return plain, rotate_by(self.rotary, rest, positions)

    def kv_latent(
        self, x: Float[Array, "*B T D"], positions: RotaryPositions
    ) -> tuple[Float[Array, "*B T L"], Float[Array, "*B T 1 P"]]:
        """The normalised latent, and the rotated key that all heads share."""
        both = self.kv_a_proj_with_mqa(x)  # *B T (L P)
        latent, shared = jnp.split(both, [both.shape[-1] - self.rotary_dim], axis=-1)
        return self.kv_a_layernorm(latent), rotate_by(self.rotary, shared[..., None, :], positions)

    def heads(
        self,
        q: tuple[Float[Array, "*B T N M"], Float[Array, "*B T N P"]],
        kv: tuple[Float[Array, "*B T L"], Float[Array, "*B T 1 P"]],
        absorbed: bool,
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"], Float[Array, "*B T K h"]]:
        """Queries, keys and values for `attend`, in either form."""
        if absorbed:
            return self._absorbed(*q, *kv)
        (plain, rotate), (latent, shared) = q, kv
        width = self.kv_b_proj.out_features // plain.shape[-2]
        both = split_heads(self.kv_b_proj(latent), width)  # *B T N (M + h)
        k, v = jnp.split(both, [self.nope_dim], axis=-1)
        shared = jnp.broadcast_to(shared, rotate.shape)  # *B T N P
        return _concat_parts(plain, rotate), _concat_parts(k, shared), v

    def _absorbed(
        self,
        plain: Float[Array, "*B T N M"],
        rotate: Float[Array, "*B T N P"],
        latent: Float[Array, "*B T L"],
        shared: Float[Array, "*B T 1 P"],
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T 1 H"], Float[Array, "*B T 1 L"]]:
        """One key/value head, since `q . (W c) = (W^T q) . c`."""
        plain, to_key = self._with_kernel(plain, slice(0, self.nope_dim))
        inner = jnp.einsum("...nm,lnm->...nl", plain, to_key)  # *B T N L
        latent = latent[..., None, :]  # *B T 1 L
        return _concat_parts(inner, rotate), _concat_parts(latent, shared), latent

    def _with_kernel(
        self, x: Float[Array, "*B T N X"], part: slice
    ) -> tuple[Float[Array, "*B T N X"], Float[Array, "L N Y"]]:
        """x and a slice of each head's `kv_b_proj` kernel, promoted to one dtype."""
        x, kernel = promote_dtype((x, kernel_of(self.kv_b_proj)), dtype=self.kv_b_proj.dtype)
        return x, kernel.reshape(kernel.shape[0], x.shape[-2], -1)[..., part]

    @property
    def default_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The scale of both forms."""
        return (self.nope_dim + self.rotary_dim) ** -0.5


# For constructors with `**latent`, so that `help` and `inspect` show all keywords.
latent_signature = keywords_of(LatentHeads)


def _check_sizes(
    in_features: int, num_heads: int, kv_rank: int, nope: int, rotate: int, value: int, q_rank: Any
) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, kv_rank=kv_rank)
    check_positive(nope_dim=nope, rotary_dim=rotate, value_dim=value)
    check_positive(q_rank=1 if q_rank is None else q_rank)


def _concat_parts(plain: Array, rotate: Array) -> Array:
    return jnp.concatenate([plain, rotate], axis=-1)
