"""Attention over 32k and 64k tokens, forward and backward, never holds an array of T x S."""

import jax
import jax.numpy as jnp
import pytest

from flax_attn import CAUSAL, FULL, attend

from .programs import both_ways, largest, temporary
from .targets import NAMES, compiled, lower

T, N, H = 32768, 2, 128
of_all_targets = pytest.mark.parametrize("target", NAMES, indirect=True)


def attention(name: str, length: int, dtype: object, **how: object) -> jax.stages.Compiled:
    aval = jax.ShapeDtypeStruct((1, length, N, H), dtype)
    run = both_ways(lambda q, k, v: attend(q, k, v, **how))
    return compiled(lower(name, run, aval, aval, aval), name)


@of_all_targets
def test_in_float32_no_array_of_weights(target):
    code = attention(target, T, jnp.float32, mask=CAUSAL, backend="blockwise")
    assert largest(code) < T * T
    assert temporary(code) < T * T  # less than a byte a weight


@of_all_targets
def test_in_bfloat16_twice_the_tokens_are_twice_the_arrays(target):
    """Of bytes it is not exactly twice: a TPU's 128 MiB beside its memory hold a share of both."""
    once, twice = (
        attention(target, length, jnp.bfloat16, mask=CAUSAL, backend="blockwise")
        for length in (T, 2 * T)
    )
    assert largest(twice) <= 2 * largest(once) < T * T
    assert temporary(once) < T * T and temporary(twice) < T * T  # half of what T x S may grow to


@of_all_targets
def test_the_plain_formula_holds_arrays_of_weights(target):
    code = attention(target, 512, jnp.float32, mask=FULL, backend="reference")
    assert largest(code) >= 512 * 512
