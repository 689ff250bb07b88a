"""Causal attention: every token attends to itself and to earlier tokens."""

from typing import Any, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.checks import check_context, check_input, check_positive, check_rate
from ..cache import attend_cached
from ..masks import CAUSAL
from ..reference import softmax
from ..taps import tap
from ._cached import AnyCache, C, CacheOptions, arithmetic_dtype, check_eval, new_cache
from ._common import merge_heads, split_heads
from ._dropout import LayerDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class CausalAttention(Layer):
    """`dropout(softmax(q k^T / sqrt(d_out), future at -inf)) v`.

    Also called: masked self-attention, autoregressive attention.

    Shapes: x `*B T d_in` -> context `*B T d_out`, for any T up to `context_length`.

    Args:
      context_length: the maximum sequence length; it adds no parameter.
      dropout: dropout rate of the weights in training, from 0 to 1.
      context_dropout: dropout rate of the context vectors.
      rngs: source of the initial values, as in `SelfAttentionV2`, and of the dropout.
      d_in, d_out, qkv_bias, kernel_init, bias_init, dtype, param_dtype: as in `SelfAttentionV2`.

    Raises:
      ValueError: for widths below 1, shares outside [0, 1], or if x is not `*B T d_in` or too long.
      TypeError: if x is not floating.

    Source: that of `SelfAttentionV2`.

    >>> from flax import nnx
    >>> layer = CausalAttention(3, 2, context_length=6, dropout=0.1, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 3)), deterministic=True).shape
    (5, 2)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        qkv_bias: bool = False,
        *,
        context_dropout: float = 0.0,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out, context_length=context_length)
        self.d_out = d_out
        self.context_length = context_length
        init = InitWithoutDropout(**more)
        self.W_query = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_key = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.W_value = init.linear(d_in, d_out, use_bias=qkv_bias)
        self.dropout = LayerDropout(check_rate("dropout", dropout), rngs=init.rngs)
        context_dropout = check_rate("context_dropout", context_dropout)
        self.context_dropout = LayerDropout(context_dropout, rngs=init.rngs)

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
        """The context vectors; `deterministic` overrides `train()` and `eval()`."""
        x = check_input("x", x, self.W_query.in_features)
        check_context(x.shape[-2], self.context_length)
        if cache is not None:
            return self._decoded(x, cache, deterministic)
        q = self.W_query(x)  # *B T d_out
        k = self.W_key(x)  # *B T d_out
        v = self.W_value(x)  # *B T d_out
        scores = q @ k.mT / self.d_out**0.5  # *B T T
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        weights = self.dropout(weights, deterministic=deterministic)
        context = tap("context", weights @ v)  # *B T d_out
        return self.context_dropout(context, deterministic=deterministic)

    def init_cache(
        self, batch: int | tuple[int, ...], length: int, **options: Unpack[CacheOptions]
    ) -> AnyCache:
        """An empty cache for up to `context_length` tokens; arguments as in `Cache.empty`."""
        check_context(length, self.context_length)
        sizes = (1, self.d_out, self.d_out)
        return new_cache(batch, length, sizes, CAUSAL, arithmetic_dtype(self.W_key), options)

    def _decoded(self, x: Array, cache: Any, deterministic: bool | None) -> tuple[Array, Any]:
        """The context vectors of new tokens, which also attend to the cache."""
        check_eval(self.dropout, deterministic)
        check_eval(self.context_dropout, deterministic)
        q = split_heads(self.W_query(x), self.d_out)  # *B T N H
        k = split_heads(self.W_key(x), self.d_out)  # *B T N H
        v = split_heads(self.W_value(x), self.d_out)  # *B T N H
        o, cache = attend_cached(q, k, v, cache, mask=CAUSAL)  # *B T N H
        return merge_heads(o), cache  # *B T d_out
