"""The short convolution against numpy: states, documents, padding, pieces, gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.recurrence import causal_convolution

B, D, W = 2, 3, 4


def matrix(x, weight, ids, start):
    """The convolution of one row, token by token: outputs and what is kept of it."""
    before = [(ids[0] if len(ids) else 0, s) for s in start]
    out = []
    for token, document in zip(x, ids, strict=True):
        before.append((document, token))
        tail = before[-W:]
        count = 0
        while count < W and tail[-1 - count][0] == document:
            count += 1
        own = [s if i >= W - count else 0 * s for i, (_, s) in enumerate(tail)]
        out.append(sum(weight[:, i] * own[i] for i in range(W)))
    tail, count = before[len(before) - W + 1 :], 0
    while count < W - 1 and tail[-1 - count][0] == before[-1][0]:
        count += 1
    kept = [s if i >= W - 1 - count else 0 * s for i, (_, s) in enumerate(tail)]
    return np.asarray(out).reshape(-1, D), np.asarray(kept)


@jax.jit
def results(ids, valid, x, weight, start, dy, dlast):
    def call(x, weight, start):
        return causal_convolution(x, weight, state=start, segments=ids, valid=valid)

    (y, last), pull = jax.vjp(call, x, weight, start)
    return y, last, *pull((dy, dlast))


def drawn(T):
    draw = np.random.RandomState(T)
    shapes = [(B, T, D), (D, W), (B, W - 1, D), (B, T, D), (B, W - 1, D)]
    return [draw.standard_normal(shape) for shape in shapes]


@pytest.mark.nightly
@pytest.mark.parametrize("T", [1, 2, 11])
def test_outputs_and_state_are_numpys(T):
    x, weight, start, dy, dlast = drawn(T)
    draw, places = np.random.RandomState(0), np.arange(T)
    for ids in (0 * places, places // 3 % 2, places // 5, places % 2):
        for valid in (np.ones((B, T), bool), draw.rand(B, T) < 0.6, np.zeros((B, T), bool)):
            dirty = np.where(valid[..., None], x, np.nan)
            given = np.where(valid, ids, 9)
            with jax.enable_x64(True):
                y, last, *gradients = results(given, valid, dirty, weight, start, dy, dlast)
            assert all(np.isfinite(a).all() for a in gradients)
            assert not np.asarray(y)[~valid].any() and not np.asarray(gradients[0])[~valid].any()
            for row, there in enumerate(valid):
                want, kept = matrix(x[row, there], weight, ids[there], start[row])
                for a, b in ((np.asarray(y)[row, there], want), (last[row], kept)):
                    verdict = judge.same_function(np.asarray(a), b)
                    assert verdict.ok or verdict.note in (judge.ZEROS, judge.EMPTY), verdict


@pytest.mark.nightly
def test_gradients_are_those_of_a_linear_map():
    """`<dy, J dx> = <J' dy, dx>`, for x, the weight and the state, with documents and padding."""
    x, weight, start, dy, dlast = drawn(11)
    ids, valid = np.arange(11) // 4, np.random.RandomState(1).rand(B, 11) < 0.8
    given = (x, weight, start)
    other = [np.random.RandomState(5 + i).standard_normal(a.shape) for i, a in enumerate(given)]
    with jax.enable_x64(True):
        call = partial(causal_convolution, segments=ids, valid=valid)

        def f(x, weight, start):
            return call(x, weight, state=start)

        _, pull = jax.vjp(jax.jit(f), x, weight, start)
        _, push = jax.jvp(jax.jit(f), (x, weight, start), tuple(other))
        left = sum(float((a * b).sum()) for a, b in zip(push, (dy, dlast), strict=True))
        pulled = pull((jnp.asarray(dy), jnp.asarray(dlast)))
        right = sum(float((a * b).sum()) for a, b in zip(pulled, other, strict=True))
    assert judge.same_function(np.asarray(left), np.asarray(right)).ok


@pytest.mark.nightly
def test_it_is_torchs():
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    x, weight, _, _, _ = drawn(11)
    bias = np.random.RandomState(3).standard_normal(D)
    module = torch.nn.Conv1d(D, D, W, groups=D, padding=W - 1).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight)[:, None])
        module.bias.copy_(torch.tensor(bias))
        want = module(torch.tensor(x).mT)[..., :11].mT.numpy()
    with jax.enable_x64(True):
        y, _ = causal_convolution(*map(jnp.asarray, (x, weight, bias)))
    assert judge.same_function(y, want).ok


@pytest.mark.nightly
def test_pieces_with_the_state_passed_on_are_the_whole():
    x, weight, state, _, _ = drawn(11)
    with jax.enable_x64(True):
        want, last = causal_convolution(x, jnp.asarray(weight), state=jnp.asarray(state))
        outputs, start = [], 0
        for end in (1, 2, 7, 11):
            y, state = causal_convolution(
                jnp.asarray(x[:, start:end]), jnp.asarray(weight), state=jnp.asarray(state)
            )
            outputs.append(y)
            start = end
    assert judge.exact(np.asarray(jnp.concatenate(outputs, 1)), np.asarray(want)).ok
    assert judge.exact(np.asarray(state), np.asarray(last)).ok


def test_the_backward_pass_keeps_one_copy_of_the_tokens():
    x, weight = jnp.ones((2, 50, 3)), jnp.ones((3, 4))
    _, pull = jax.vjp(jax.jit(causal_convolution), x, weight)
    floats = [a.shape for a in jax.tree.leaves(pull) if a.size >= x.size]
    assert floats == [(2, 53, 3)]


def test_bad_input_is_refused_in_a_sentence():
    x = jnp.ones((2, 5, 3))
    with pytest.raises(ValueError, match="weight must be D W with D=3"):
        causal_convolution(x, jnp.ones((4, 3)))
    with pytest.raises(ValueError, match="bias must be"):
        causal_convolution(x, jnp.ones((3, 4)), jnp.ones(4))
    with pytest.raises(ValueError, match="state must hold W - 1 tokens"):
        causal_convolution(x, jnp.ones((3, 4)), state=jnp.ones((2, 4, 3)))
