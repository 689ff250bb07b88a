"""Multi-head causal attention: three wide projections, split into heads."""

from typing import Any, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_context, check_divides, check_input, check_positive, check_rate
from ..cache import attend_cached
from ..masks import CAUSAL
from ..reference import softmax
from ..taps import tap
from ._cached import AnyCache, C, CacheOptions, arithmetic_dtype, check_eval, new_cache
from ._common import merge_heads, split_heads
from ._dropout import LayerDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class MultiHeadAttention(Layer):
    """`out_proj(concat_n(dropout(softmax(q_n k_n^T / sqrt(H), future at -inf)) v_n))`.

    Also called: multi-head attention (MHA), multi-head self-attention (MHSA).

    Head n of N uses its H = d_out / N columns of the projections.

    Shapes: x `*B T d_in` -> `*B T d_out`, for any T up to `context_length`.

    Args:
      d_out: width of all heads together.
      num_heads: number of heads; must divide d_out.
      out_proj: whether a Linear layer with bias follows. Without it, this is
        `MultiHeadAttentionWrapper` with heads of width d_out / N.
      d_in, context_length, dropout, qkv_bias, kernel_init, bias_init, rngs, dtype, param_dtype: as
        of `CausalAttention`.

    Raises:
      ValueError: for counts below 1, heads that do not divide d_out, a rate outside [0, 1], or if
        x is not `*B T d_in` or too long.
      TypeError: if x is not floating.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2; as in Raschka,
    "Build a Large Language Model (From Scratch)", 2024, chapter 3.

    >>> from flax import nnx
    >>> layer = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((6, 3))).shape
    (6, 2)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        out_proj: bool = True,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = check_divides("num_heads", num_heads, "d_out", d_out)
        self.context_length = context_length
        init = InitWithoutDropout(**more)
        self.W_query = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_key = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_value = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.out_proj = init.linear(d_out, d_out) if out_proj else None
        self.dropout = LayerDropout(check_rate("dropout", dropout), rngs=init.rngs)

    @overload
    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None, cache: None = None
    ) -> Float[Array, "*B T d_out"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None, cache: C
    ) -> tuple[Float[Array, "*B T d_out"], C]: ...
    def __call__(
        self,
        x: Float[Array, "*B T d_in"],
        *,
        deterministic: bool | None = None,
        cache: AnyCache | None = None,
    ) -> Any:
        """The projected context vectors; `deterministic` overrides `train()` and `eval()`."""
        x = check_input("x", x, self.W_query.in_features)
        check_context(x.shape[-2], self.context_length)
        if cache is not None:
            return self._decoded(x, cache, deterministic)
        heads = (*x.shape[:-1], self.num_heads, self.head_dim)
        q = jnp.swapaxes(self.W_query(x).reshape(heads), -3, -2)  # *B N T H
        k = jnp.swapaxes(self.W_key(x).reshape(heads), -3, -2)  # *B N T H
        v = jnp.swapaxes(self.W_value(x).reshape(heads), -3, -2)  # *B N T H
        scores = q @ k.mT / self.head_dim**0.5  # *B N T T
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        weights = self.dropout(weights, deterministic=deterministic)
        context = tap("context", jnp.swapaxes(weights @ v, -3, -2))  # *B T N H
        context = context.reshape(*x.shape[:-1], self.d_out)  # *B T d_out
        return context if self.out_proj is None else self.out_proj(context)

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache for up to `context_length` tokens; arguments as in `Cache.empty`."""
        check_context(length, self.context_length)
        sizes = (self.num_heads, self.head_dim, self.head_dim)
        return new_cache(batch, length, sizes, CAUSAL, arithmetic_dtype(self.W_key), options)

    def _decoded(self, x: Array, cache: Any, deterministic: bool | None) -> tuple[Array, Any]:
        """The outputs of new tokens, which also attend to the cache."""
        check_eval(self.dropout, deterministic)
        q = split_heads(self.W_query(x), self.head_dim)  # *B T N H
        k = split_heads(self.W_key(x), self.head_dim)  # *B T N H
        v = split_heads(self.W_value(x), self.head_dim)  # *B T N H
        o, cache = attend_cached(q, k, v, cache, mask=CAUSAL)  # *B T N H
        o = merge_heads(o)  # *B T d_out
        return (o if self.out_proj is None else self.out_proj(o)), cache
