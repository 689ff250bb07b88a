"""The laws of gradients under masks: they equal those of the formula and are finite."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import CAUSAL, Dense, Full, ScoreFn, Softcap, reference
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from flax_attn.rules import Rules

from ..backends.law_cases import eager64, normal, outcome

B, N, K, T, S, H = 2, 4, 2, 3, 5, 3
SIZES = Sizes((B,), N, T, S)
SEEN = np.random.RandomState(0).rand(B, N, T, S) < 0.6
SEEN[..., 0] = True


def given():
    return [jnp.asarray(normal(1 + i, B, L, M, H)) for i, (L, M) in enumerate([(T, N), (S, K)])]


def same(got, want):
    return all(judge.same_function(a, b).ok for a, b in zip(got, want, strict=True))


@eager64
def test_gradients_under_a_mask_and_a_score_are_those_of_the_formula():
    q, k = given()
    v, do = jnp.asarray(normal(3, B, S, K, H)), jnp.asarray(normal(4, B, T, N, H))
    cap = jnp.asarray(1.5)

    def formula(q, k, v, cap):
        k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
        x = cap * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 / cap)
        powers = jnp.where(SEEN, jnp.exp(x), 0)
        weights = powers / powers.sum(-1, keepdims=True)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def ours(q, k, v, cap):
        for score in (Softcap(cap), ScoreFn(lambda x, *at: cap * jnp.tanh(x / cap))):
            rules = Rules(Dense(SEEN), score).bind(SIZES, H)
            yield lambda *x, rules=rules: reference.attention(*x, rules)[0]

    want = outcome(formula, (q, k, v, cap), do)
    for run in ours(q, k, v, cap):
        assert same(outcome(run, (q, k, v), do), want[:4])

    def trained(q, k, v, cap):
        return reference.attention(q, k, v, Rules(Dense(SEEN), Softcap(cap)).bind(SIZES, H))[0]

    assert same(outcome(trained, (q, k, v, cap), do)[1:], want[1:])


@eager64
def test_the_lse_of_a_fully_masked_row_has_no_gradient():
    x = jnp.asarray([[-jnp.inf, -jnp.inf], [0.0, 1.0]])
    lse, grad = outcome(lambda x: reference.softmax_and_lse(x)[1], (x,), np.asarray([3.0, 2.0]))
    assert np.isneginf(lse[0]) and judge.same_function(lse[1:], np.log1p(np.e)[None]).ok
    share = np.e / (1 + np.e)
    assert not grad[0].any() and judge.same_function(grad[1], [2 - 2 * share, 2 * share]).ok


@eager64
def test_no_cotangent_enters_at_fully_masked_rows():
    def weights(x):
        return reference.softmax_and_stats(x, None, jnp.asarray(SEEN))[0]

    x, do = normal(5, B, N, T, S), normal(6, B, N, T, S)
    _, want = outcome(weights, (x,), np.where(SEEN, do, 0))
    for wild in (np.inf, np.nan):
        _, got = outcome(weights, (x,), np.where(SEEN, do, wild))
        assert judge.same_function(got, want).ok


@eager64
def test_a_derivative_that_is_infinite_at_a_hidden_logit_reaches_nothing():
    q, k = given()
    q = q.at[:, :, 0].set(0.0)  # the first head's logits are zero, where a root has no slope
    seen = SEEN.copy()
    seen[:, 0] = False

    def weights(q, root):
        score = ScoreFn(lambda p, x, *at: x + p * jnp.sqrt(jnp.abs(x)), root)
        rules = Rules(Dense(seen), score).bind(SIZES, H)
        return reference.weights_and_stats(q, k, rules)[0]

    for grad in outcome(weights, (q, jnp.asarray(0.5)), normal(7, B, N, T, S))[1:]:
        assert np.isfinite(grad).all() and grad.any()


@eager64
def test_a_logit_that_overflows_where_it_is_hidden_reaches_no_parameter():
    q, k = given()
    q, k = q.at[0, 0, 0, 0].set(1e200), k.at[0, 3, 0, 0].set(1e200)
    seen = SEEN.copy()
    seen[0, :2, :, 3] = False  # no head of the first pair sees that key
    seen[0, 0, 0] = False
    seen[0, 0, 0, 0] = True  # and its huge query sees the first key alone

    def weights(q, k, gain):
        score = ScoreFn(lambda p, x, *at: jnp.tanh(x) + p * x, gain)
        rules = Rules(Dense(seen), score).bind(SIZES, H)
        return reference.weights_and_stats(q, k, rules)[0]

    assert np.isinf(jnp.einsum("h,h->", q[0, 0, 0], k[0, 3, 0]))
    for found in outcome(weights, (q, k, jnp.asarray(0.5)), normal(8, B, N, T, S)):
        assert np.isfinite(found).all()


class Unasked(Full):
    def grid(self, sizes):
        raise AssertionError("a mask that hides nothing is no table")


def test_a_mask_that_hides_nothing_makes_no_table():
    q, k = given()
    rules = Rules(Unasked()).bind(SIZES, H)
    weights, _ = jax.jit(lambda q, k: reference.weights_and_stats(q, k, rules))(q, k)
    assert np.isfinite(weights).all()


def test_debug_infs_finds_no_infinite_values():
    with jax.debug_infs(True):
        for mask in (Dense(SEEN), Full()):
            q, k = given()
            found = reference.attention(q, k, k, Rules(mask).bind(SIZES, H))
            assert np.isfinite(found[0]).all()


def test_symbolic_lengths_reach_the_mask_when_they_are_known():
    for lengths in ("t, 5", "6, s", "t, s"):
        open_t, open_s = jax.export.symbolic_shape(lengths)
        q, k = (
            jax.ShapeDtypeStruct((1, n, m, 3), "float32") for n, m in ((open_t, 4), (open_s, 2))
        )
        rules = Rules(CAUSAL).bind(Sizes((1,), 4, open_t, open_s), 3)
        run = jax.jit(lambda q, k, rules=rules: reference.zero_masked(q, k, k, rules))
        sizes = {"t": 6, "s": 5}
        given = [
            jnp.ones((1, *(sizes.get(str(n), n) for n in x.shape[1:2]), *x.shape[2:]))
            for x in (q, k)
        ]
        for a, b in zip(jax.export.export(run)(q, k).call(*given), (*given, given[1]), strict=True):
            assert np.array_equal(a, b)
