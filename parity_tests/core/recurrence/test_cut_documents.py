"""Packed documents cut anywhere into calls: no state of one reaches the next."""

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
    X,
    agree,
    call,
    drawn_state,
    of_layers,
    of_two_layers,
    state_of,
)

PIECES = (4, 0, 4, 5)  # few sizes, since each is compiled; the ids are what varies
ENDS = np.cumsum(PIECES)
T = ENDS[-1]
IDS = np.asarray([0, -1, 7, 2**31 - 1, -(2**31)], np.int32)


def drawn_ids(draw):
    """Ids of each token: documents of random lengths, with borders at the cuts and within."""
    begins = draw.rand(2, T) < 0.3
    begins[:, ENDS[:-1]] |= draw.rand(2, len(ENDS) - 1) < 0.5
    steps = np.where(begins, draw.randint(1, len(IDS), (2, T)), 0)
    return IDS[np.cumsum(steps, axis=1) % len(IDS)]


def in_pieces(name, ids, valid, state):
    """Outputs and the last state of calls one after another."""
    outputs = []
    for begin, end in zip((0, *ENDS[:-1]), ENDS, strict=True):
        part = np.s_[:, begin:end]
        y, state = call(name, X[part], segments=ids[part], valid=valid[part], cache=state)
        outputs.append(y)
    return np.concatenate(outputs, axis=1), state


@pytest.mark.nightly
def test_every_recurrent_layer_is_here():
    exported = {getattr(flax_attn, name) for name in flax_attn.__all__ if name[0].isupper()}
    layers = {x for x in exported if isinstance(x, type) and issubclass(x, Recurrent)}
    assert {type(make(rngs=nnx.Rngs(0))) for make in LAYERS.values()} == layers


@pytest.mark.nightly
@of_layers
def test_a_cut_changes_nothing(name):
    draw = np.random.RandomState(0)
    with jax.enable_x64(True):
        for padded in (0.0, 0.0, 0.0, 0.3, 0.3):
            ids, valid = drawn_ids(draw), draw.rand(2, T) >= padded
            valid[:, 2:4] &= draw.rand(2, 1) >= padded  # at the end of a call, too
            want, last = call(name, X, segments=ids, valid=valid, cache=state_of(name, 2))
            found, after = in_pieces(name, ids, valid, state_of(name, 2))
            agree(found, want)
            agree(after, last)
            there = [row[mask][-1] for row, mask in zip(ids, valid, strict=True)]
            assert after.segment.tolist() == there and after.has_segment.all()


@of_layers
def test_lengths_count_from_the_first_token_of_a_row_and_padding_is_zero(name):
    mask = CAUSAL & Documents([[3, 0, 6], [5, 3, 2]])
    counts = ([3, 0, 6, T - 9], [5, 3, 2, T - 10])
    ids = np.asarray([np.repeat(np.arange(4), of_row) for of_row in counts])
    with jax.enable_x64(True):
        want = call(name, X, segments=ids, valid=ids < 3)
        agree(call(name, X, mask=mask), want)
        state, found = state_of(name, 2), []
        for begin, end in zip((0, *ENDS[:-1]), ENDS, strict=True):
            y, state = call(name, X[:, begin:end], mask=mask, cache=state)
            found.append(y)
        agree(np.concatenate(found, axis=1), want)
        agree(call(name, np.where(ids[..., None] < 3, X, np.nan), mask=mask), want)


def test_ids_are_told_from_lengths():
    mask = CAUSAL & Documents(np.zeros(T, int))
    with pytest.raises(ValueError, match="as ids do"):
        jax.eval_shape(lambda x: LAYERS["mamba"](rngs=nnx.Rngs(0))(x, mask=mask), X)


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
def test_rows_carry_their_document():
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rg_lru"])
def test_a_document_that_begins_a_call_is_as_the_first_of_a_row(name):
    """This layer gives the first token of a document another weight."""
    with jax.enable_x64(True):
        one, two = np.ones((2, 4), np.int32), np.full((2, 9), 2, np.int32)
        _, state = call(name, X[:, :4], segments=one, cache=state_of(name, 2))
        y, state = call(name, X[:, 4:], segments=two, cache=state)
        agree(y, call(name, X[:, 4:], segments=two, cache=state_of(name, 2))[0])
        assert state.length.tolist() == [T, T]


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
