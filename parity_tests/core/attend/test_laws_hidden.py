"""The laws of masked values in the plain formula: they affect no output or gradient."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import (
    CAUSAL,
    FULL,
    Additive,
    Alibi,
    Causal,
    Dense,
    MaskFn,
    ScoreFn,
    Softcap,
    Window,
    reference,
    taps,
)
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from flax_attn.rules import Rules
from flax_attn.scores import IDENTITY

from ..backends.law_cases import eager64, normal, outcome

B, N, K, T, S, H = 2, 4, 2, 3, 5, 3
SIZES = Sizes((B,), N, T, S)
SEEN = np.random.RandomState(0).rand(B, N, T, S) < 0.6
SEEN[0, 1, 2] = SEEN[1, :, 1] = False  # queries that see nothing
SEEN[..., 4] = False  # a key that nobody sees
SEEN[0, 0, 0, 0] = True


def test_nonfinite_numbers_are_zeroed_where_masked():
    x = jnp.asarray([1.0, np.nan, np.inf, -np.inf, 0.0], "bfloat16")
    for seen in (np.zeros(5, bool), np.asarray([True, False, False, False, False])):
        found = reference.zero_nonfinite_where_masked(seen, x)
        assert found.dtype == jnp.bfloat16 and found.tolist() == [1, 0, 0, 0, 0]
    whole = reference.zero_nonfinite_where_masked(np.ones(5, bool), x)
    assert str(whole.tolist()) == str(x.tolist())
    assert reference.zero_nonfinite_where_masked(np.eye(5, dtype=bool), x[None]).shape == (5, 5)


def given(*scales):
    q, k, v = normal(1, B, T, N, H), normal(2, B, S, K, H), normal(3, B, S, K, H)
    return [jnp.asarray(x) for x in (q, k, v)]


def poisoned(bias):
    bias = bias.copy()
    bias[~SEEN] = np.resize([np.nan, np.inf, -np.inf, 1e300], (~SEEN).sum())
    return bias


def biased(make, bias):
    """Output and gradients of q and the bias, where `make` gives the score of a bias."""

    def run(q, bias):
        rules = Rules(Dense(SEEN), make(bias)).bind(SIZES, H)
        return reference.attention(q, *given()[1:], rules)[0]

    return outcome(run, (given()[0], bias), normal(5, B, T, N, H))


@eager64
def test_a_masked_score_affects_no_output_or_gradient():
    clean = np.where(SEEN, normal(4, B, N, T, S), 0)
    for make in (
        Additive,
        lambda x: Additive(x) >> Softcap(2.0),
        lambda x: Softcap(2.0) >> Additive(x),
        lambda x: Alibi(np.ones(N)) >> (Additive(x) >> Softcap(3.0)),
        lambda x: Additive(x) >> Alibi(np.arange(N) / 3),
    ):
        want, got = biased(make, clean), biased(make, poisoned(clean))
        for a, b in zip(got, want, strict=True):
            assert np.isfinite(a).all() and judge.same_function(a, b, zero=True).ok
        assert not got[2][~SEEN].any()


@eager64
def test_a_score_of_logits_sees_them_where_they_are_shown():
    def bent(x, b, n, q, k):
        return jnp.tanh(x) + (n - k).astype(x.dtype)

    @jax.jit
    def weighted(q, k, v, rules, logits):
        q, k, _ = reference.zero_masked(q, k, v, rules)
        return reference.weights_and_stats(q, k, rules)[0], rules.score.grid(logits, SIZES)

    q, k, v = given()
    for score in (ScoreFn(bent), Softcap(0.5), Alibi(np.ones(N)), IDENTITY):
        rules = Rules(Dense(SEEN), score).bind(SIZES, H)
        logits = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, N // K, 2)) * H**-0.5
        weights, x = weighted(q, k, v, rules, logits)
        x = np.where(SEEN, x, -np.inf)
        powers = np.where(SEEN, np.exp(x - np.where(SEEN, x, -1e9).max(-1, keepdims=True)), 0)
        total = powers.sum(-1, keepdims=True)
        want = powers / np.where(total == 0, 1, total)
        assert judge.same_function(weights, want, zero=True).ok


def test_the_softmax_is_over_visible_keys_only():
    x = normal(6, B, N, T, S).astype("float32")
    x[~SEEN] = 50.0
    softmax = jax.jit(reference.softmax_and_stats)
    weights, stats = softmax(x, None, SEEN)
    alone, _ = softmax(np.where(SEEN, x, np.float32(-np.inf)))
    assert judge.exact(weights, alone).ok and not np.asarray(weights)[~SEEN].any()
    assert np.array_equal(np.asarray(stats.l) == 0, ~SEEN.any(-1))
    assert np.array_equal(np.isneginf(stats.lse), ~SEEN.any(-1))

    def one(x):
        return reference.softmax_and_stats(x, None, jnp.asarray(SEEN))[0][..., 0].sum()

    x[~SEEN] = np.inf
    grad = np.asarray(jax.jit(jax.grad(one))(x))
    assert np.isfinite(grad).all() and not grad[~SEEN].any()


@eager64
def test_a_tap_of_the_scores_has_minus_infinity_where_masked():
    q, k, _ = given()
    for mask, seen in ((Dense(SEEN), SEEN), (FULL, np.ones_like(SEEN))):
        rules = Rules(mask).bind(SIZES, H)
        with taps.listen() as heard:
            reference.weights_and_stats(q, k, rules)
        ((name, found),) = heard
        assert name == "scores" and np.array_equal(np.isneginf(found), ~seen)


@eager64
def test_fully_masked_rows_receive_no_cotangent():
    q, k, v = given()
    dead = ~SEEN.any(-1).swapaxes(1, 2)
    bias = np.where(SEEN, 0.0, -np.inf)
    do = normal(7, B, T, N, H)
    for rules in (Rules(Dense(SEEN)), Rules(score=Additive(bias))):
        rules = rules.bind(SIZES, H)
        run = lambda *x, rules=rules: reference.attention(*x, rules)[0]  # noqa: E731
        clean, got = (
            outcome(run, (q, k, v), np.where(dead[..., None], x, do)) for x in (0, np.nan)
        )
        assert not clean[0][dead].any()
        for a, b in zip(got, clean, strict=True):
            assert judge.exact(a, b).ok
    plain = Rules().bind(SIZES, H)
    run = lambda v: reference.attention(q, k, v, plain)[0]  # noqa: E731
    assert np.isnan(outcome(run, (v,), np.full((B, T, N, H), np.nan))[1]).all()


MASKS = {
    "causal": CAUSAL,
    "past": Causal(-2),
    "window": Window(3, 0, -1),
    "far": Causal(10**6),
    "none": ~FULL,
    "band": Window(2, 2) & ~Window(0, 0),
}


def test_static_masks_are_evaluated_a_few_queries_at_a_time():
    for T, S in ((3, 5), (256, 9), (300, 40), (600, 520), (40, 300)):
        sizes = Sizes((), 1, T, S)
        for name, mask in MASKS.items():
            q, k = np.arange(T)[:, None], np.arange(S)[None]
            seen = np.broadcast_to(mask(0, 0, q, k), (T, S))
            grid, sees, keys = reference.static_visible(mask, sizes)
            assert (grid is None) == (T * S > 2**16) and (grid is None or (grid == seen).all()), (
                name
            )
            for found, want in ((sees, seen.any(1)), (keys, seen.any(0))):
                assert want.all() if found is None else np.array_equal(found, want), name
    assert reference.static_visible(CAUSAL, Sizes((), 1, 2**13, 2**13 + 1)) is None
    assert reference.static_visible(CAUSAL, Sizes((), 1, 2**10, 2**16)) is not None


def test_static_masks_leave_no_table_in_the_program():
    """A constant is left only if the mask hides something that is known early."""

    def primitives(mask, T, S):
        q, k = jnp.ones((1, T, 2, 4)), jnp.ones((1, S, 1, 4))
        rules = Rules(mask).bind(Sizes((1,), 2, T, S), 4)
        made = jax.make_jaxpr(lambda *x: reference.zero_masked(*x, rules))(q, k, k)
        return made, [str(e.primitive) for e in made.eqns]

    for mask, selects in ((FULL, 0), (Window(9, 9), 0), (CAUSAL, 2), (Causal(-2), 3)):
        made, found = primitives(mask, 6, 8)
        assert sum(x in ("select_n", "jit", "pjit") for x in found) == selects, mask
        assert not any(x.aval.size >= 6 * 8 and x.aval.dtype == bool for x in made.jaxpr.constvars)


@eager64
def test_a_shared_key_is_visible_if_one_query_head_sees_it():
    q, k, v = given()
    for table in (SEEN, SEEN[:, :1], SEEN[:, :2].repeat(2, 1), SEEN[:1], SEEN[:1, :1, :1]):
        whole = np.broadcast_to(table, SEEN.shape)
        rules = Rules(Dense(table)).bind(SIZES, H)
        qz, kz, vz = jax.jit(reference.zero_masked)(q, k, v, rules)
        rows = whole.any(3).swapaxes(1, 2)
        keys = whole.reshape(B, K, N // K, T, S).any((2, 3)).swapaxes(1, 2)
        assert np.array_equal(np.asarray(qz).any(-1), rows)
        assert np.array_equal(np.asarray(kz).any(-1), keys)
        assert np.array_equal(np.asarray(vz).any(-1), keys)


def test_a_mask_may_be_one_truth():
    q, k, v = (np.asarray(x, "float32") for x in given())
    for truth in (True, False):
        for mask in (
            MaskFn(lambda b, n, q, k, truth=truth: truth),
            Window(None, None, jnp.asarray(1)),
        ):
            mask = mask if truth or isinstance(mask, MaskFn) else ~mask
            rules = Rules(mask).bind(SIZES, H)
            for x in jax.jit(reference.zero_masked)(q, k, v, rules):
                assert bool(np.asarray(x).any()) is truth
