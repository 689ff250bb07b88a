"""What recurrent layers share: their tokens, their short convolution, their state."""

from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Bool, Float, Int

from .._arrays import aligned
from .._checks import check_input, check_positive
from .._types import wide
from ..cache import State
from ..cache.rows import batch_axes
from ..recurrence import causal_convolution
from ._common import check_tokens, torch_uniform
from ._sources import zero_absent

Cached = State | None


def entered(
    x: Float[Array, "*B T D"], width: int, valid: Bool[Array, "*#B T"] | None, cache: Cached
) -> Float[Array, "*B T D"]:
    """x, with zeros for the tokens that are not there.

    Raises:
      TypeError: if x is not floating, valid not boolean, or the cache no State.
      ValueError: if their shapes do not fit.

    >>> entered(jnp.ones((2, 1)), 1, jnp.asarray([True, False]), None).tolist()
    [[1.0], [0.0]]
    """
    x = check_input("x", x, width)
    if cache is not None and not isinstance(cache, State):
        raise TypeError(
            "cache must be a State, made by this layer's init_cache(batch, length); got "
            f"{type(cache).__name__}."
        )
    if cache is not None and cache.length.shape != x.shape[:-2]:
        raise ValueError(
            f"The cache has rows {cache.length.shape}, and x has {x.shape[:-2]}; make it with "
            f"init_cache({x.shape[:-2]}, length)."
        )
    return zero_absent(x, valid)


@overload
def left(y: Any, valid: Any, cache: None, recurrent: Any, convolution: Any) -> jax.Array: ...
@overload
def left(
    y: Any, valid: Any, cache: State, recurrent: Any, convolution: Any
) -> tuple[jax.Array, State]: ...
def left(
    y: Float[Array, "*B T D"],
    valid: Bool[Array, "*#B T"] | None,
    cache: Cached,
    recurrent: Float[Array, "..."] | None,
    convolution: Float[Array, "*B V E"] | None,
) -> Any:
    """y, zero for the tokens that are not there, and with a cache the state after them."""
    y = zero_absent(y, valid)
    if cache is None:
        return y
    count = check_tokens("valid", valid, y).sum(axis=-1, dtype=jnp.int32)
    return y, cache.then(recurrent, convolution, count)


def recurrent_of(cache: Cached) -> Any:
    """The recurrence's state in a cache; None without one."""
    return None if cache is None else cache.recurrent


def short_convolution(
    features: int,
    size: int,
    use_bias: bool,
    kernel_init: Initializer | None,
    bias_init: Initializer | None,
    dtype: Any,
    param_dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.Conv:
    """The weights of a causal convolution of each component, which start as torch's do.

    They are read by `convolved`; the module itself is not called.
    """
    start = torch_uniform(size)
    return nnx.Conv(
        features,
        features,
        (size,),
        padding="CAUSAL",
        feature_group_count=features,
        use_bias=use_bias,
        kernel_init=start if kernel_init is None else kernel_init,
        bias_init=start if bias_init is None else bias_init,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )


def convolved(
    conv: nnx.Conv,
    x: Float[Array, "*B T D"],
    cache: Cached,
    segments: Int[Array, "*#B T"] | None,
    valid: Bool[Array, "*#B T"] | None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B V D"]]:
    """The causal convolution of x, and its state after the last token."""
    weight = conv.kernel[...][:, 0].T  # D W
    bias = None if conv.bias is None else conv.bias[...]
    state = None if cache is None else cache.convolution
    return causal_convolution(x, weight, bias, segments=segments, valid=valid, state=state)


def empty_state(
    batch: int | tuple[int, ...],
    length: int,
    layers: int | None,
    dtype: Any,
    *,
    recurrent: tuple[int, ...] | None,
    convolution: tuple[int, ...] | None,
) -> State:
    """The state before the first token, of `batch` rows; with `layers` stacked for a scan.

    Args:
      batch: how many rows, or the batch axes.
      length: taken as by caches of attention; a state has one size for any length.
      layers: None for one layer.
      dtype: of the convolution's state; the recurrence's is float32 or wider.
      recurrent, convolution: shapes behind the batch axes; None where there is none.

    Raises:
      ValueError: for counts below 1.

    >>> empty_state(2, 9, None, jnp.float32, recurrent=(3,), convolution=None).recurrent.shape
    (2, 3)
    """
    check_positive(length=length)
    rows = batch_axes(batch, layers)
    far = None if recurrent is None else jnp.zeros((*rows, *recurrent), wide(dtype))
    near = None if convolution is None else jnp.zeros((*rows, *convolution), dtype)
    return State(far, near, jnp.zeros(rows, jnp.int32))


def decay_parameters(
    heads: int, biases: int, param_dtype: Any, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param]:
    """`A_log` of each head and `dt_bias`, as Mamba starts: A from 1 to 16, steps 0.001 to 0.1.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    >>> A_log, dt_bias = decay_parameters(3, 3, jnp.float32, nnx.Rngs(0))
    >>> bool((A_log[...] >= 0).all()), dt_bias.shape
    (True, (3,))
    """
    a = jax.random.uniform(rngs.params(), (heads,), param_dtype, 1.0, 16.0)
    low, high = np.log(1e-3), np.log(1e-1)
    dt = jnp.exp(jax.random.uniform(rngs.params(), (biases,), param_dtype, low, high))
    return nnx.Param(jnp.log(a)), nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))


def log_decay(
    a: Float[Array, "*X"], A_log: Float[Array, "..."], dt_bias: Float[Array, "..."]
) -> Float[Array, "*X"]:
    """`-exp(A_log) softplus(a + dt_bias)`, in float32 or wider: never above zero.

    >>> log_decay(jnp.zeros((1, 1)), jnp.zeros(1), jnp.full(1, 200.0)).tolist()
    [[-200.0]]
    """
    a = a.astype(wide(a.dtype))
    return -jnp.exp(aligned(A_log, a)) * jax.nn.softplus(a + aligned(dt_bias, a))


def gated(
    x: Float[Array, "*B T N h"],
    gate: Float[Array, "*B T N h"],
    activation: Callable[[jax.Array], jax.Array] = nnx.silu,
) -> Float[Array, "*B T N h"]:
    """`x * activation(gate)`, computed in float32 or wider, in the dtype of x."""
    kind = wide(x.dtype)
    return (x.astype(kind) * activation(gate.astype(kind))).astype(x.dtype)
