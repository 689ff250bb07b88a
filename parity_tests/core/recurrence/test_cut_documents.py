"""Recurrent layers on packed documents with padding, cut anywhere into calls."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn
from flax_attn import CAUSAL, Documents, State
from flax_attn.layers import linear
from flax_attn.layers._recurrent import Recurrent
from parity_tests.core.recurrence.test_recurrent_layers import (
    LAYERS,
    T,
    X,
    agree,
    call,
    drawn_state,
    of_layers,
    of_two_layers,
    split,
    state_of,
)

IDS = np.asarray([0, -1, 7, 2**31 - 1, -(2**31)], np.int32)


@cache
def compiled(name):
    """Outputs, last state, and the gradients of parameters and tokens; one program a layer."""
    graph, params = split(name)
    empty = state_of(name, 2)

    @jax.jit
    def run(x, ids, valid, state, dy):
        def call(params, x):
            return nnx.merge(graph, params)(x, segments=ids, valid=valid, cache=state)

        y, pull, after = jax.vjp(call, params, x, has_aux=True)
        return y, after, *pull(dy)

    def numpy(x, ids, valid, state=empty, dy=X):
        return jax.tree.map(np.array, run(x, ids, valid, state, dy))

    return numpy


def alone(name, document, valid):
    """As `compiled`, each document by itself from the first token on, without a cut or padding."""
    y, dx = np.zeros_like(X), np.zeros_like(X)
    for number in range(document.max() + 1):
        mine = valid & (document == number)
        front = np.arange(T) < mine.sum(1, keepdims=True)
        order = np.argsort(~mine, axis=1, kind="stable")[..., None]
        x = np.take_along_axis(X, order, axis=1)
        one, state, dparams, slope = compiled(name)(x, 0 * document, front, dy=x)
        y[mine], dx[mine] = one[front], slope[front]
        if number == 0:
            after, total = state, dparams
            continue
        total = jax.tree.map(np.add, total, dparams)
        for row in np.flatnonzero(mine.any(1)):
            for old, new in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
                old[row] = new[row]
    return y, after, total, dx


@pytest.mark.nightly
def test_every_exported_recurrent_layer_is_tested_here():
    exported = {getattr(flax_attn, name) for name in flax_attn.__all__ if name[0].isupper()}
    layers = {x for x in exported if isinstance(x, type) and issubclass(x, Recurrent)}
    assert {type(make(rngs=nnx.Rngs(0))) for make in LAYERS.values()} == layers


@of_layers
def test_packed_documents_in_any_calls_equal_each_document_alone_with_gradients(name):
    draw = np.random.RandomState(0)
    for _ in range(4):
        begins = draw.rand(2, T) < 0.3
        calls = (draw.rand(T) < 0.3).cumsum()
        begins[:, 1:] |= (draw.rand(2, T - 1) < 0.5) & (np.diff(calls) > 0)
        ids = IDS[np.where(begins, draw.randint(1, 5, (2, T)), 0).cumsum(1) % 5]
        valid = draw.rand(2, T) < draw.choice([1, 0.6])
        document = np.zeros((2, T), int)
        for row, there in enumerate(valid):
            own = ids[row, there]
            document[row, there] = np.cumsum(np.diff(own, prepend=own[:1]) != 0)
        dirty, ids = np.where(valid[..., None], X, np.nan), np.where(valid, ids, draw.choice(IDS))
        with jax.enable_x64(True):
            run, (y, after, dparams, dx) = compiled(name), alone(name, document, valid)
            found = run(dirty, ids, valid)
            agree((found[0], *found[2:]), (y, dparams, dx))
            parts, state = 0, state_of(name, 2)
            for call in range(calls[-1] + 1):
                part, state, *_ = run(dirty, ids, valid & (calls == call), state)
                parts = parts + part
        last = [row[there][-1] for row, there in zip(ids, valid, strict=True)]
        agree((parts, state.recurrent, state.convolution), (y, after.recurrent, after.convolution))
        assert state.segment.tolist() == last and state.has_segment.all()
        assert state.length.tolist() == valid.sum(1).tolist()


@of_layers
def test_lengths_count_from_the_first_token_of_a_row_and_padding_is_zero(name):
    mask = CAUSAL & Documents([[3, 0, 6], [5, 3, 2]])
    counts = ([3, 0, 6, T - 9], [5, 3, 2, T - 10])
    ids = np.asarray([np.repeat(np.arange(4), of_row) for of_row in counts])
    with jax.enable_x64(True):
        want, *_ = compiled(name)(X, ids, ids < 3)
        for x in (X, np.where(ids[..., None] < 3, X, np.nan)):
            agree(call(name, x, mask=mask), want)
        state, found = state_of(name, 2), 0
        for begin, end in ((0, 4), (4, 4), (4, 8), (8, T)):
            now = (np.arange(T) >= begin) & (np.arange(T) < end)
            y, state = call(name, X, mask=mask, valid=now, cache=state)
            found = found + np.asarray(y)
        agree(found, want)


def test_ids_in_the_place_of_lengths_are_refused():
    mask, (graph, params) = CAUSAL & Documents(np.zeros(T, int)), split("mamba")
    with jax.enable_x64(True), pytest.raises(ValueError, match="as ids do"):
        jax.eval_shape(lambda x: nnx.merge(graph, params)(x, mask=mask), X)


@pytest.mark.nightly
@of_two_layers
def test_without_ids_the_document_goes_on(name):
    with jax.enable_x64(True):
        ids = np.asarray([[3] * T, [0] * T], np.int32)
        for first, then in ((ids[:, :4], None), (None, ids[:, 4:]), (None, None)):
            y, state = call(name, X[:, :4], segments=first, cache=state_of(name, 2))
            z, state = call(name, X[:, 4:], segments=then, cache=state)
            agree(np.concatenate([y, z], axis=1), call(name, X))
            assert state.has_segment.all() == (first is not None or then is not None)


@pytest.mark.nightly(but=["mamba2"])
@of_two_layers
def test_a_state_of_an_earlier_version_goes_on_and_learns_the_document(name):
    with jax.enable_x64(True):
        ids = np.full((2, T), 3, np.int32)
        _, state = call(name, X[:, :4], cache=state_of(name, 2))
        older = State(state.recurrent, state.convolution, state.length)
        y, state = call(name, X[:, 4:], segments=ids[:, 4:], cache=older)
        agree(y, call(name, X)[:, 4:])
        assert state.segment.tolist() == [3, 3] and state.has_segment.all()


@pytest.mark.nightly
def test_take_reset_and_insert_carry_the_document_of_each_row():
    state = drawn_state()
    state = State(*jax.tree.leaves(state)[:3], jnp.asarray([5, 0, -1]), jnp.asarray([True] * 3))
    taken = state.take(jnp.asarray([2, 0, 2]))
    assert taken.segment.tolist() == [-1, 5, -1]
    gone = state.reset(jnp.asarray([False, True, False]))
    assert gone.has_segment.tolist() == [True, False, True]
    assert gone.has_segment.dtype == bool and gone.segment.dtype == jnp.int32
    put = gone.insert(1, state.take(jnp.asarray([0])))
    assert put.segment.tolist() == [5, 5, -1] and put.has_segment.all()


@pytest.mark.nightly
def test_no_gradient_passes_a_border_between_calls():
    name, ids = "gated_delta", np.asarray([[1] * 4 + [2] * 9, [1] * T], np.int32)

    def second(x):
        _, state = call(name, x[:, :4], segments=ids[:, :4], cache=state_of(name, 2))
        return (call(name, x[:, 4:], segments=ids[:, 4:], cache=state)[0] ** 2).sum()

    with jax.enable_x64(True):
        gradient = np.abs(jax.grad(second)(X))[:, :4].max(axis=(1, 2))
    assert gradient[0] == 0 < gradient[1]


def test_linear_attention_takes_documents_as_recurrences_do(monkeypatch):
    """Drawn lengths, documents across the borders of its chunks, NaN behind the last."""
    monkeypatch.setattr(linear, "CHUNK", 4)
    with jax.enable_x64(True):
        how = {"causal": True, "param_dtype": jnp.float64}
        layer = nnx.jit(lambda: flax_attn.LinearAttention(11, 2, 5, **how, rngs=nnx.Rngs(0)))()
        called = nnx.jit(lambda layer, x, n: layer(x, mask=CAUSAL & Documents(n), positions=n))
        alone = nnx.jit(lambda layer, x, valid: layer(x, mask=valid))
        draw = np.random.RandomState(0)
        for _ in range(4):
            lengths = draw.randint(0, 6, (2, 3))
            ids = np.asarray([np.repeat(range(4), [*n, T - n.sum()])[:T] for n in lengths])
            y = called(layer, np.where(ids[..., None] < 3, X, np.nan), lengths)
            agree(y, sum(alone(layer, X, ids == document) for document in range(3)))
        assert called(layer, X[:, :0], lengths).shape == (2, 0, 11)
    layer.causal = False
    with pytest.raises(ValueError, match="without causal=True takes a mask of tokens"):
        layer(X, mask=CAUSAL & Documents([T]))
