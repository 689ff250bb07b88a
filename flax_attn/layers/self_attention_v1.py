"""Self-attention with three plain weight matrices."""

from typing import Unpack

import jax
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from .._internal.checks import check_input, check_positive
from ..reference import softmax
from ..taps import tap
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class SelfAttentionV1(Layer):
    """`softmax(q k^T / sqrt(d_out)) v` with `q = x W_query`, `k = x W_key`, `v = x W_value`.

    The three are plain Params of shape `(d_in, d_out)`, initialized from U[0, 1). They multiply
    from the right: copy them from a torch Parameter as they are, from an `nn.Linear` transposed.

    Shapes: x `*B T d_in` -> context `*B T d_out`.

    Args:
      kernel_init: initializer of the three weights; None draws from U[0, 1).
      bias_init: accepted by every layer; there is no bias.
      rngs: source of the initial values.
      d_in, d_out, dtype, param_dtype: as in `SelfAttentionV2`.

    Raises:
      ValueError, TypeError: as in `SelfAttentionV2`.

    Source: that of `SelfAttentionV2`.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> SelfAttentionV1(3, 2, rngs=nnx.Rngs(0))(jnp.ones((6, 3))).shape
    (6, 2)
    """

    @init_signature
    def __init__(
        self,
        d_in: int,
        d_out: int,
        **more: Unpack[InitKeywords],
    ):
        check_positive(d_in=d_in, d_out=d_out)
        self.d_out = d_out
        init = InitWithoutDropout(**more)
        self.dtype = init.dtype
        self.W_query = init.param((d_in, d_out), jax.random.uniform)
        self.W_key = init.param((d_in, d_out), jax.random.uniform)
        self.W_value = init.param((d_in, d_out), jax.random.uniform)

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The context vectors. There is no dropout, so `deterministic` has no effect."""
        x = check_input("x", x, self.W_query.shape[0])
        x, W_query, W_key, W_value = promote_dtype(
            (x, self.W_query[...], self.W_key[...], self.W_value[...]), dtype=self.dtype
        )
        q = x @ W_query  # *B T d_out
        k = x @ W_key  # *B T d_out
        v = x @ W_value  # *B T d_out
        scores = tap("scores", q @ k.mT / self.d_out**0.5)  # *B T T
        weights = tap("weights", softmax(scores))
        return tap("context", weights @ v)  # *B T d_out
