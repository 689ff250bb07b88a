"""Layers with arithmetic of their own: dtypes, initial values, and a dropout rate of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import taps
from flax_attn.layers import CausalAttention, CausalRenormalisedAttention, SelfAttentionV1
from parity_tests.core.drawing import float64 as float64

from .numpy_layers import CLIMB, D

SHAPE = 2, 2, 7, D
BIASED = {"qkv_bias": True}
LAYERS = {
    kind: {**sizes, **(BIASED if "qkv_bias" in options else {})}
    for kind, sizes, options in CLIMB.values()
}

of_all = pytest.mark.parametrize("kind", LAYERS)


def build(kind, **given):
    """A layer with its arguments of `LAYERS`, in float64 unless another dtype is given."""
    config = {**LAYERS[kind], "param_dtype": jnp.float64, "rngs": nnx.Rngs(0), **given}
    return kind(**config)


def tokens(*shape):
    return jnp.asarray(np.random.RandomState(0).standard_normal(shape))


@pytest.mark.parametrize("kind", [CausalAttention, CausalRenormalisedAttention])
def test_a_dropout_rate_of_one_gives_zeros(kind):
    out = nnx.jit(lambda x: build(kind, dropout=1.0)(x))(tokens(*SHAPE))
    assert not np.any(out)


@of_all
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtype_reaches_the_arithmetic(kind, dtype):
    def told(x):
        with taps.listen() as heard:
            return build(kind, dtype=dtype)(x), [value for _, value in heard]

    out, heard = jax.eval_shape(told, tokens(2, 5, D))
    assert {out.dtype, *(value.dtype for value in heard)} == {jnp.dtype(dtype)}


@of_all
def test_parameters_have_their_dtype_and_nothing_else_is_state(kind):
    state = nnx.eval_shape(lambda: nnx.state(build(kind, param_dtype=jnp.float32)))
    for _, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Param):
            assert variable.get_value().dtype == jnp.float32
        else:
            assert isinstance(variable, nnx.RngState)


@of_all
def test_initial_values_have_the_range_of_torch(kind):
    low, high = (0.0, 1.0) if kind is SelfAttentionV1 else (-(D**-0.5), D**-0.5)
    state = nnx.jit(lambda: nnx.state(build(kind), nnx.Param))()
    for path, param in nnx.to_flat_state(state):
        if "out_proj" not in path:
            drawn = np.asarray(param[...])
            assert low <= drawn.min() < drawn.max() < high
