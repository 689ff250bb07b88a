"""The associative scan over components against numpy, one token after another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.parity import judge
from flax_attn.recurrence import elementwise_recurrence

B, D = 2, 5


def wanted(x, g, first, h, dh, dlast):
    """Outputs, last, and the gradients of x, g and the first state."""
    start, out, before = h, [], []
    for t in range(x.shape[1]):
        before.append(np.where(first[:, t, None], 0.0, h))
        h = np.exp(g[:, t]) * before[-1] + x[:, t]
        out.append(h)
    dx, dg, d = np.zeros_like(x), np.zeros_like(g), dlast
    for t in reversed(range(x.shape[1])):
        d = d + dh[:, t]
        dx[:, t], dg[:, t] = d, d * np.exp(g[:, t]) * before[t]
        d = np.where(first[:, t, None], 0.0, d * np.exp(g[:, t]))
    return np.stack(out, 1), h, dx, dg, d + 0 * start


@jax.jit
def results(ids, valid, x, g, start, dh, dlast):
    def call(x, g, start):
        return elementwise_recurrence(x, g, state=start, segments=ids, valid=valid)

    (h, last), pull = jax.vjp(call, x, g, start)
    return h, last, *pull((dh, dlast))


def drawn(T):
    draw = np.random.RandomState(T)
    x, dh = (draw.standard_normal((B, T, D)) for _ in "xd")
    g = -draw.gamma(0.5, 2.0, (B, T, D))
    start, dlast = (draw.standard_normal((B, D)) for _ in "sd")
    return x, g, start, dh, dlast


def found(x, ids, valid):
    with jax.enable_x64(True):
        return [np.asarray(a) for a in results(ids, valid, *x)]


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("T", [1, 2, 37])
def test_outputs_state_and_gradients_are_numpys(T):
    x, all_there = drawn(T), np.ones((B, T), bool)
    for ids in (np.zeros((B, T), int), np.arange(B * T).reshape(B, T) // 9):
        first = np.concatenate([np.zeros((B, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        for g in (x[1], 0 * x[1], np.where(x[1] < -1, -np.inf, x[1])):
            want = wanted(x[0], g, first, *x[2:])
            for a, b in zip(found((x[0], g, *x[2:]), ids, all_there), want, strict=True):
                verdict = judge.same_function(a, b)
                assert verdict.ok or verdict.note == judge.ZEROS, verdict


def test_padding_is_as_if_it_was_not_there_and_may_hold_anything():
    T = 37
    x, valid = drawn(T), np.random.RandomState(0).rand(B, T) < 0.7
    ids = np.broadcast_to(np.arange(T) // 12, (B, T))
    dirty = [np.where(valid[..., None], a, np.nan) for a in x[:2]]
    h, last, dx, dg, dstart = found((*dirty, *x[2:]), np.where(valid, ids, 77), valid)
    for row in range(B):
        there = valid[row]
        cut = [a[row : row + 1, there] for a in (x[0], x[1], x[3])]
        own = ids[row, there]
        first = np.concatenate([[False], own[1:] != own[:-1]])[None]
        want = wanted(*cut[:2], first, x[2][[row]], cut[2], x[4][[row]])
        got = (h[row, there], last[row], dx[row, there], dg[row, there], dstart[row])
        for a, b in zip(got, want, strict=True):
            verdict = judge.same_function(a, b[0])
            assert verdict.ok or verdict.note == judge.ZEROS, verdict
    assert not any(a[~valid].any() for a in (h, dx, dg))


@pytest.mark.nightly
def test_the_backward_pass_keeps_outputs_decays_and_the_first_state():
    x = jnp.zeros((2, 64, 3))
    _, pull = jax.vjp(jax.jit(elementwise_recurrence), x, x)
    assert sorted(a.shape for a in jax.tree.leaves(pull)) == [(2, 3), x.shape, x.shape]


def test_bad_input_is_refused_in_a_sentence():
    x = jnp.ones((2, 5, 3))
    with pytest.raises(ValueError, match="x and log_decay must have one shape"):
        elementwise_recurrence(x, x[:, 1:])
    with pytest.raises(ValueError, match=r"state must be \*B D = \(2, 3\)"):
        elementwise_recurrence(x, x, state=x)
