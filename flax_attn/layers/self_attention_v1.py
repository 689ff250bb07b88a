"""Self-attention with trainable weights, first version: three matrices to the right of x."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.typing import Initializer
from jaxtyping import Array, Float

from .._checks import check_input, check_positive
from ..reference import softmax
from ..taps import tap


class SelfAttentionV1(nnx.Module):
    """`softmax(q k^T / sqrt(d_out)) v` with `q = x W_query`, `k = x W_key`, `v = x W_value`.

    The three are plain Params of shape `(d_in, d_out)` that start from U[0, 1). They multiply from
    the right: from a torch Parameter of the same name they come as they are, from an `nn.Linear`
    transposed.

    Shapes: x `*B T d_in` -> context `*B T d_out`.

    Args:
      kernel_init: initializer of the three weights; None draws from U[0, 1).
      bias_init: taken as by every layer; there is no bias.
      rngs: source of the random start.
      d_in, d_out, dtype, param_dtype: as of `SelfAttentionV2`.

    Raises:
      ValueError, TypeError: as of `SelfAttentionV2`.

    Source: that of `SelfAttentionV2`.

    >>> SelfAttentionV1(3, 2, rngs=nnx.Rngs(0))(jnp.ones((6, 3))).shape
    (6, 2)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_positive(d_in=d_in, d_out=d_out)
        self.d_out = d_out
        self.dtype = dtype
        start = jax.random.uniform if kernel_init is None else kernel_init
        self.W_query = nnx.Param(start(rngs.params(), (d_in, d_out), param_dtype))
        self.W_key = nnx.Param(start(rngs.params(), (d_in, d_out), param_dtype))
        self.W_value = nnx.Param(start(rngs.params(), (d_in, d_out), param_dtype))

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T d_out"]:
        """The context vectors. There is no dropout, so `deterministic` changes nothing."""
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
