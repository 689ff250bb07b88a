"""Linear layers that start as torch's do."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def torch_linear(
    in_features: int,
    out_features: int,
    *,
    use_bias: bool = True,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """An `nnx.Linear` whose kernel and bias start from U(+-1 / sqrt(in_features)), as in torch.

    >>> torch_linear(3, 2, rngs=nnx.Rngs(0)).kernel.shape
    (3, 2)
    """
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=torch_uniform(in_features),
        bias_init=torch_uniform(in_features),
        rngs=rngs,
    )


def torch_uniform(fan_in: int) -> Any:
    """The initializer U(+-1 / sqrt(fan_in))."""
    bound = fan_in**-0.5

    def init(
        key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any
    ) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
