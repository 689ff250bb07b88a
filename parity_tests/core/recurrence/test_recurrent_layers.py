"""Recurrent layers: cuts into calls, and states that are carried, taken and reset."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    GatedDeltaAttention,
    State,
)
from flax_attn.parity import judge
from parity_tests.core import layer_facts
from parity_tests.tables import with_nightly

LAYERS = layer_facts.RECURRENT
of_layers = pytest.mark.parametrize("name", LAYERS)
of_two_layers = pytest.mark.parametrize("name", with_nightly(LAYERS, commit=4))
T = 13
X = np.random.RandomState(0).standard_normal((2, T, 11))


@cache
def split(name):
    """A layer in float64: its graph, and its state."""
    with jax.enable_x64(True):
        layer = nnx.eval_shape(lambda: LAYERS[name](rngs=nnx.Rngs(0), param_dtype=jnp.float64))
        graph, params = nnx.split(layer)
        leaves, tree = jax.tree.flatten(params)
        draw = np.random.RandomState(1)
        return graph, jax.tree.unflatten(tree, [draw.standard_normal(x.shape) for x in leaves])


@cache
def program(name):
    graph, _ = split(name)
    return jax.jit(lambda params, x, **more: nnx.merge(graph, params)(x, **more))


def call(name, x, **more):
    return program(name)(split(name)[1], x, **more)


def state_of(name, batch):
    graph, params = split(name)
    return nnx.merge(graph, params).init_cache(batch, 99)


def agree(found, want):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        verdict = judge.same_function(np.asarray(a), np.asarray(b))
        assert verdict.ok or verdict.note in (judge.ZEROS, judge.EMPTY), verdict


@of_two_layers
def test_any_cut_into_calls_equals_the_whole(name):
    with jax.enable_x64(True):
        whole, last = call(name, X, cache=state_of(name, 2))
        agree(whole, call(name, X))
        for cuts in ([1, 2, 7, 8], [5, 10, 11, 12]):  # of two sizes, since each is compiled
            state, outputs, start = state_of(name, 2), [], 0
            for end in (*cuts, T):
                y, state = call(name, X[:, start:end], cache=state)
                outputs.append(y)
                start = end
            agree((np.concatenate(outputs, 1), state), (whole, last))
        assert last.length.tolist() == [T, T]


@pytest.mark.nightly(but=["lightning"])
@of_layers
def test_a_state_is_carried_by_a_scan_and_keeps_shapes_and_dtypes(name):
    layer = nnx.jit(lambda: LAYERS[name](rngs=nnx.Rngs(0), dtype=jnp.bfloat16))()
    x = jnp.asarray(X, jnp.bfloat16)

    @jax.jit
    def decode(state):
        def step(state, x):
            y, state = layer(x[:, None], cache=state)
            return state, y

        return jax.lax.scan(step, state, jnp.swapaxes(x, 0, 1))

    first = layer.init_cache(2, 99)
    last, y = decode(first)
    assert y.dtype == jnp.bfloat16
    first, last = ([(x.shape, x.dtype) for x in jax.tree.leaves(state)] for state in (first, last))
    assert first == last
    stacked = layer.init_cache(2, 99, layers=3)
    assert {a.shape[0] for a in jax.tree.leaves(stacked)} == {3}


def drawn_state():
    draw = np.random.RandomState(4)
    shapes = [(3, 2, 4, 5), (3, 3, 7)]
    recurrent, near = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in shapes)
    return State(recurrent, near, jnp.asarray([1, 2, 3], jnp.int32))


@pytest.mark.nightly
def test_rows_of_a_state_are_taken_reset_and_inserted():
    state = drawn_state()
    agree(
        state.take(jnp.asarray([2, 0, 2])), jax.tree.map(lambda x: x[np.asarray([2, 0, 2])], state)
    )
    gone = state.reset(jnp.asarray([False, True, False]))
    agree(gone.take(jnp.asarray([0, 2])), state.take(jnp.asarray([0, 2])))
    assert not any(x[1].any() for x in jax.tree.leaves(gone))
    one = state.take(jnp.asarray([2]))
    put = jax.jit(lambda state, row: state.insert(row, one))(gone, 1)
    agree(put.take(jnp.asarray([1])), one)
    agree(put.take(jnp.asarray([0])), state.take(jnp.asarray([0])))
    agree(state.check(), state)


@pytest.mark.nightly
def test_a_state_that_held_nan_is_clean_after_reset():
    nan = jnp.full((3, 2), jnp.nan)
    state = State(nan, nan, jnp.ones(3, jnp.int32)).reset(jnp.ones(3, bool))
    assert not any(x.any() for x in jax.tree.leaves(state))


@pytest.mark.nightly
def test_bad_input_is_refused_in_a_sentence():
    state, layer = drawn_state(), GatedDeltaAttention(11, 2, 4, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="A State cannot be truncated"):
        state.truncate(1)
    with pytest.raises(ValueError, match="insert takes a State of one row"):
        state.insert(0, state)
    x = jnp.asarray(X, jnp.float32)
    with pytest.raises(TypeError, match="cache must be a State"):
        layer(x, cache=x)
    with pytest.raises(ValueError, match=r"The cache has rows \(3,\)"):
        layer(x, cache=layer.init_cache(3, 9))
    with pytest.raises(ValueError, match=r"batch\[0\] must be a whole number"):
        layer.init_cache(0, 9)
