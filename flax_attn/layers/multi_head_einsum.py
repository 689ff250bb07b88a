"""Multi-head causal attention with einsum instead of transpositions."""

from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from .._internal.arrays import aligned
from .._internal.checks import check_context, check_divides, check_input, check_positive, check_rate
from ..reference import softmax
from ..taps import tap
from ._common import torch_uniform
from ._dropout import LayerDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


def project(
    x: Float[Array, "*B T d_in"], weight: nnx.Param, bias: nnx.Param | None, dtype: Any
) -> Float[Array, "*B T d_out"]:
    """`x weight^T + bias`, with a weight of shape `(d_out, d_in)`."""
    x, w, b = promote_dtype((x, weight, bias), dtype=dtype)
    y = jnp.einsum("...td,od->...to", x, w)
    return y if bias is None else y + aligned(jnp.asarray(b), y)


class MultiHeadAttentionEinsum(Layer):
    """`MultiHeadAttention` with Params `W_query, W_key, W_value` of shape `(d_out, d_in)`.

    That is the shape of torch's `nn.Linear.weight`, so they are ported from there untransposed;
    with `qkv_bias` there are `b_query, b_key, b_value` of shape `(d_out,)`.

    Shapes: x `*B T d_in` -> `*B T d_out`, for any T up to `context_length`.

    Args:
      qkv_bias: whether queries, keys and values have biases; `out_proj` always has one.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's. The three
        weights have shape `(d_out, d_in)`, so an initializer that scales by fan-in needs
        `in_axis=-1, out_axis=-2`; `out_proj` is an `nnx.Linear` with the usual kernel shape.
      d_in, d_out, context_length, dropout, num_heads, rngs, dtype, param_dtype: as in
        `MultiHeadAttention`.

    Raises:
      ValueError, TypeError: as in `MultiHeadAttention`.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3, bonus material;
    its own einsum over x and W names W's axes the other way round and needs d_in == d_out.

    >>> layer = MultiHeadAttentionEinsum(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
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
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out, context_length=context_length, num_heads=num_heads)
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = check_divides("num_heads", num_heads, "d_out", d_out)
        self.context_length = context_length
        init, start = InitWithoutDropout(**more), torch_uniform(d_in)
        self.dtype = init.dtype
        weights = (init.param((d_out, d_in), start) for _ in range(3))
        self.W_query, self.W_key, self.W_value = weights
        bias = partial(init.param, (d_out,), start, is_bias=True)
        biases = (bias() if qkv_bias else None for _ in range(3))
        self.b_query, self.b_key, self.b_value = biases
        self.out_proj = init.linear(d_out, d_out)
        self.dropout = LayerDropout(check_rate("dropout", dropout), rngs=init.rngs)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The projected context vectors; `deterministic` overrides `train()` and `eval()`."""
        x = check_input("x", x, self.W_query.shape[1])
        check_context(x.shape[-2], self.context_length)
        heads = (*x.shape[:-1], self.num_heads, self.head_dim)
        q = project(x, self.W_query, self.b_query, self.dtype).reshape(heads)  # *B T N H
        k = project(x, self.W_key, self.b_key, self.dtype).reshape(heads)  # *B S N H
        v = project(x, self.W_value, self.b_value, self.dtype).reshape(heads)  # *B S N H
        scores = jnp.einsum("...tnh,...snh->...nts", q, k) / self.head_dim**0.5
        future = jnp.triu(jnp.ones_like(scores, dtype=bool), k=1)
        scores = tap("scores", jnp.where(future, -jnp.inf, scores))
        weights = tap("weights", softmax(scores))
        weights = self.dropout(weights, deterministic=deterministic)
        context = tap("context", jnp.einsum("...nts,...snh->...tnh", weights, v))
        return self.out_proj(context.reshape(*x.shape[:-1], self.d_out))
