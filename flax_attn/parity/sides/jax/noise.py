"""Moves the result of one JAX operation by up to a unit in the last place, for any seed.

The noise is a hash of the value's own bits, its place and the seed: no key is threaded through
loops, and a repeated operation on other values gets other noise. As in torch's runs, sums are moved
by a unit of the sum of absolute terms, since each addition rounds, and what copies or selects is
not moved.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

# Operations that copy, select, compare or take the nearest whole number.
EXACT = frozenset(
    (
        *("abs", "neg", "sign", "floor", "ceil", "round", "clamp", "max", "min", "select_n"),
        *("reduce_max", "reduce_min", "cummax", "cummin", "argmax", "argmin", "sort", "top_k"),
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev"),
        *("dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "gather", "split"),
        *("scatter", "copy", "copy_p", "iota", "stop_gradient", "optimization_barrier"),
        *("convert_element_type", "bitcast_convert_type", "real", "imag", "complex", "conj"),
        *("tie_in", "select_and_gather_add", "reduce_precision", "device_put", "name"),
    )
)
# Sums whose terms are the operands' products or the operands themselves.
SUMS = frozenset(("dot_general", "conv_general_dilated", "reduce_sum", "cumsum"))


def moved(
    equation: Any, values: Sequence[Any], outs: Sequence[Any], seed: tuple[int, int]
) -> list[Any]:
    """The results of an operation, each element moved at random by its own rounding error."""
    name = equation.primitive.name
    if name in EXACT or not any(map(_is_real, outs)):
        return list(outs)
    sizes = _absolute_terms(equation, values, outs) if name in SUMS else [jnp.abs(x) for x in outs]
    return [
        _moved(x, size, (*seed, i)) if _is_real(x) else x
        for i, (x, size) in enumerate(zip(outs, sizes, strict=True))
    ]


def _absolute_terms(equation: Any, values: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The sums of absolute terms."""
    params = dict(equation.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = outs[0].dtype
    primitive = equation.primitive
    return [primitive.bind(*map(jnp.abs, values), **primitive.get_bind_params(params))]


def _moved(x: Any, size: Any, seed: tuple[int, ...]) -> Any:
    step = (jnp.finfo(x.dtype).eps * _noise(x, seed).astype(x.dtype)) * size.astype(x.dtype)
    other = x + step
    return jnp.where(jnp.isfinite(other), other, x)


def _noise(x: Any, seed: tuple[int, ...]) -> Any:
    """Numbers in [-1, 1) that depend on the bits of `x`, on its places and on the seed."""
    places = lax.iota(jnp.uint32, max(x.size, 1))[: x.size].reshape(x.shape)
    start = np.uint32(np.random.SeedSequence(seed).generate_state(1)[0])
    # Half of a float64's bits are enough, and the low half is the one that rounding changes.
    unsigned = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    hashed = lax.convert_element_type(bits, jnp.uint32) ^ (places * np.uint32(0x9E3779B9)) ^ start
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ (hashed >> np.uint32(shift))) * np.uint32(factor)
    return hashed.astype(jnp.float32) / 2.0**31 - 1.0


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and x.size > 0
