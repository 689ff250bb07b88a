"""Scores against numpy: values, gradients of their parameters, blocks, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Additive, Alibi, ScoreFn, Softcap, attend
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal

B, N, T, S = 2, 3, 5, 7
SIZES = Sizes((B,), N, T, S)


LOGITS = 3 * normal(0, B, N, T, S)
BIAS, SLOPES = normal(1, N, T, S), np.asarray([0.5, 0.2, 0.9])
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(S))


def per_head(params, x, b, n, q, k):
    return x * params[n] + (q - 2 * k + b).astype(x.dtype)


SCORES = {
    "softcap": (Softcap(2.0), 2 * np.tanh(LOGITS / 2)),
    "alibi": (Alibi(SLOPES), LOGITS - SLOPES[:, None, None] * DISTANCE),
    "additive": (Additive(BIAS), LOGITS + BIAS),
    "modify": (
        ScoreFn(per_head, SLOPES),
        LOGITS * SLOPES[:, None, None]
        + np.arange(T)[:, None]
        - 2 * np.arange(S)
        + np.arange(B)[:, None, None, None],
    ),
    "cap then bias": (Softcap(2.0) >> Additive(BIAS), 2 * np.tanh(LOGITS / 2) + BIAS),
    "bias then cap": (Additive(BIAS) >> Softcap(2.0), 2 * np.tanh((LOGITS + BIAS) / 2)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_their_formula(name):
    score, want = SCORES[name]
    bound = score.bind(SIZES)
    logits = jnp.asarray(LOGITS)
    assert judge.same_function(bound.grid(logits, SIZES), want).ok
    b, n, q, k = SIZES.grid()
    block = bound(logits[1:, :, 2:4, 3:], b[1:], n, q[:, :, 2:4], k[..., 3:])
    assert judge.same_function(block, want[1:, :, 2:4, 3:]).ok


@pytest.mark.nightly
def test_alibi_from_the_end():
    got = Alibi(SLOPES, offset="end").bind(SIZES).grid(jnp.asarray(LOGITS), SIZES)
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    assert judge.same_function(got, LOGITS - SLOPES[:, None, None] * distance).ok


@pytest.mark.nightly
def test_gradients_reach_every_parameter():
    c = normal(2, B, N, T, S)

    def gradient(make, at):
        loss = lambda p: jnp.sum(c * make(p).bind(SIZES).grid(jnp.asarray(LOGITS), SIZES))  # noqa: E731
        return jax.grad(loss)(jnp.asarray(at))

    u = LOGITS / 2.0
    by_cap = np.sum(c * (np.tanh(u) - u / np.cosh(u) ** 2))
    assert judge.same_function(gradient(Softcap, 2.0), by_cap).ok
    assert judge.same_function(gradient(Alibi, SLOPES), -np.sum(c * DISTANCE, axis=(0, 2, 3))).ok
    assert judge.same_function(gradient(Additive, BIAS), c.sum(axis=0)).ok
    by_head = np.sum(c * LOGITS, axis=(0, 2, 3))
    assert judge.same_function(gradient(lambda p: ScoreFn(per_head, p), SLOPES), by_head).ok


@pytest.mark.nightly
def test_chains_are_as_they_are_written_however_grouped():
    one, two, three = Softcap(2.0), Additive(BIAS), Alibi(SLOPES)
    want = 2 * np.tanh(LOGITS / 2) + BIAS - SLOPES[:, None, None] * DISTANCE
    for chain in ((one >> two) >> three, one >> (two >> three)):
        assert judge.same_function(chain.bind(SIZES).grid(jnp.asarray(LOGITS), SIZES), want).ok


def test_equal_scores_do_not_trace_twice_and_their_arrays_are_leaves():
    traces = []

    @jax.jit
    def f(q, score):
        traces.append(score)
        return attend(q, q, q, score=score)

    q = jnp.asarray(normal(3, T, N, 4))
    for cap in (2.0, 2.0, 3.0):
        for slopes in (SLOPES, 2 * SLOPES):
            f(q, Softcap(cap) >> Alibi(slopes))
    assert len(traces) == 2
    assert Softcap(2.0) >> Alibi(SLOPES) == Softcap(2.0) >> Alibi(SLOPES.copy())
    assert len(jax.tree.leaves(Softcap(2.0) >> Alibi(SLOPES) >> Additive(BIAS))) == 2


@pytest.mark.nightly
def test_several_batch_axes():
    sizes, bias = Sizes((2, B), N, T, S), normal(6, B, 1, 1, S)
    logits = normal(7, 2, B, N, T, S)
    flat = jnp.asarray(logits.reshape(2 * B, N, T, S))
    got = Additive(bias).bind(sizes).grid(flat, sizes).reshape(logits.shape)
    assert judge.same_function(got, logits + bias).ok


@pytest.mark.nightly
def test_an_additive_row_of_minus_infinity_is_a_row_that_sees_nothing():
    q, k = jnp.asarray(normal(3, T, N, 4)), jnp.asarray(normal(4, S, N, 4))
    o, lse = attend(
        q,
        k,
        k,
        score=Additive(np.where(np.arange(T)[:, None] == 2, -np.inf, BIAS)),
        return_lse=True,
    )
    assert not o[2].any() and jnp.isneginf(lse[2]).all() and jnp.isfinite(o).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Softcap(0.0), ValueError, "above zero; got 0.0"),
        (lambda: Additive(np.ones((2, 2), bool)), TypeError, "mask="),
        (
            lambda: Additive(np.ones((T, S + 1))).bind(SIZES),
            ValueError,
            r"\(2, 3, 5, 7\).*\(5, 8\)",
        ),
        (lambda: Alibi(np.ones(4)).bind(SIZES), ValueError, r"\(3,\).*\(4,\)"),
        (lambda: Alibi(np.ones(3), offset="start"), ValueError, '"end"'),
        (lambda: Alibi(np.ones(3), offset=np.arange(1.0)), ValueError, "an integer"),
        (lambda: Softcap(float("inf")), ValueError, "finite and above zero; got inf"),
        (lambda: Softcap(np.ones(S)), ValueError, r"one number for all heads; got shape \(7,\)"),
        (lambda: Softcap("30"), TypeError, "must be a number; got '30'"),
        (lambda: Softcap(2.0) >> BIAS, TypeError, r"got ndarray.*Additive\(array\)"),
        (
            lambda: (
                ScoreFn(lambda x, b, n, q, k: x[0]).bind(SIZES).grid(jnp.asarray(LOGITS), SIZES)
            ),
            ValueError,
            "keep the logits' shape",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.usefixtures("float64")
def test_an_index_beyond_an_array_has_one_gradient_in_every_backend():
    """That of the entry that it reads; indices are drawn, many of them outside on either side."""
    length, (q, k, v) = 9, (normal(seed, 1, 13, 2, 4) for seed in range(3))

    def at(params, i, j):
        return params["a"] * i + params["b"] * j + params["c"]

    def read(params, x, b, n, i, j):
        return x * params["array"][at(params, i, j)]

    def inside(params, x, b, n, i, j):
        index = at(params, i, j)
        index = jnp.where(index < 0, index + length, index)  # negative ones count from the end
        return x * params["array"][jnp.clip(index, 0, length - 1)]

    def loss(array, steps, fn, backend):
        params = {"array": array, **steps}
        return (attend(q, k, v, score=ScoreFn(fn, params), backend=backend) * v).sum()

    gradient = jax.jit(jax.grad(loss), static_argnames=("fn", "backend"))
    draw = np.random.default_rng(0)
    for _ in range(20):
        steps = dict(zip("abc", map(np.int32, draw.integers(-2, 3, 3) * [1, 1, 6]), strict=True))
        array = draw.normal(size=length)
        want = gradient(array, steps, inside, "reference")
        for backend in ("reference", "blockwise"):
            assert judge.allclose(gradient(array, steps, read, backend), want), (steps, backend)
