"""The laws of the plain formula against numpy loops: outputs, weights, lse, masking, taps."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import (
    Additive,
    Causal,
    Dense,
    Dropout,
    DropoutMask,
    Lengths,
    Softcap,
    reference,
    taps,
)
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from flax_attn.rules import Rules

from ..backends.law_cases import eager64, normal

B, T, S, N, K, H, h = 3, 5, 7, 8, 4, 6, 9
G = N // K
SIZES = Sizes((B,), N, T, S)


def arrays():
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, h)


def ragged():
    """What may be seen: one query sees nothing, one key head is seen by one of its heads alone."""
    seen = np.random.RandomState(3).rand(B, N, T, S) < 0.6
    seen[1, 2, 3] = False  # a row that sees nothing
    seen[:, :, 4, :] &= np.arange(B)[:, None, None] != 2  # a query of all heads
    seen[0, 2:4, :, 5] = False  # a key of both heads of key head 1
    seen[1, 4, :, 1], seen[1, 5, :, 1] = False, True  # a key that one of two heads sees
    return seen


BIAS, SINKS = normal(4, N, T, S), np.arange(N) / 4 - 1  # the same in float32
KEPT = np.random.RandomState(6).rand(B, N, T, S) < 0.7


def by_loops(q, k, v, *, score=None, seen=None, scale=H**-0.5, sinks=None, keep=None, rate=0.0):
    """Output, lse, scores and weights, one row at a time."""
    o, lse = np.zeros((B, T, N, h)), np.full((B, N, T), -np.inf)
    scores, weights = np.full((B, N, T, S), -np.inf), np.zeros((B, N, T, S))
    for b, n, t in np.ndindex(B, N, T):
        for s in range(S):
            logit = scale * sum(q[b, t, n] * k[b, s, n // G])
            if seen is None or seen[b, n, t, s]:
                scores[b, n, t, s] = logit if score is None else score(logit, n, t, s)
        total = np.exp(scores[b, n, t]).sum() + (0 if sinks is None else np.exp(sinks[n]))
        if total:
            lse[b, n, t] = np.log(total)
            weights[b, n, t] = np.exp(scores[b, n, t]) / total
        for s in range(S):
            kept = 1.0 if keep is None else keep[b, n, t, s] / (1 - rate)
            o[b, t, n] += kept * weights[b, n, t, s] * v[b, s, n // G]
    return o, lse, scores, weights


def capped(logit, n, t, s):
    return 2 * np.tanh(logit / 2) + BIAS[n, t, s]


CAUSAL = np.broadcast_to(np.arange(S) <= np.arange(T)[:, None] + 1, (B, N, T, S))
SHORT = np.broadcast_to(np.arange(S) < np.asarray([3, 7, 0])[:, None, None, None], (B, N, T, S))
# The rules, and what the loops are told.
RULES = {
    "plain": (lambda: Rules(), {}),
    "scale": (lambda: Rules(scale=0.7), {"scale": 0.7}),
    "scale, an array": (lambda: Rules(scale=jnp.asarray(0.75, "float32")), {"scale": 0.75}),
    "mask": (lambda: Rules(mask=Dense(ragged())), {"seen": ragged()}),
    "causal": (lambda: Rules(mask=Causal(1)), {"seen": CAUSAL}),
    "lengths": (lambda: Rules(mask=Lengths(np.asarray([3, 7, 0]))), {"seen": SHORT}),
    "score": (lambda: Rules(score=Softcap(2.0) >> Additive(BIAS)), {"score": capped}),
    "sinks": (lambda: Rules(sinks=SINKS.astype("float32")), {"sinks": SINKS}),
    "dropout": (lambda: Rules(dropout=DropoutMask(KEPT, 0.25)), {"keep": KEPT, "rate": 0.25}),
    "one keep for all": (
        lambda: Rules(dropout=DropoutMask(KEPT[:1, :1], 0.25)),
        {"keep": np.broadcast_to(KEPT[:1, :1], KEPT.shape), "rate": 0.25},
    ),
    "all": (
        lambda: Rules(
            Dense(ragged()),
            Softcap(2.0) >> Additive(BIAS),
            0.9,
            jnp.asarray(SINKS),
            DropoutMask(KEPT, 0.5),
        ),
        {
            "seen": ragged(),
            "score": capped,
            "scale": 0.9,
            "sinks": SINKS,
            "keep": KEPT,
            "rate": 0.5,
        },
    ),
}


@jax.jit
def listened(q, k, v, rules):
    """Output and lse, and what is heard in its order."""
    with taps.listen() as heard:
        found = reference.forward(q, k, v, rules)
    assert len(heard) == len(dict(heard))
    return found, OrderedDict(heard)


@eager64
def test_every_rule_agrees_with_loops():
    q, k, v = arrays()
    for name, (make, told) in RULES.items():
        rules = make().bind(SIZES, H)
        want = by_loops(*arrays(), **told)
        got, heard = listened(q, k, v, rules)
        for one, two in zip(got, want[:2], strict=True):
            assert one.dtype == jnp.float64 and judge.same_function(one, two).ok, name
        keep = [("keep", told.get("keep"))] if "keep" in told else []
        names = [("scores", want[2]), ("weights", want[3]), *keep]
        assert [*heard] == [x[0] for x in names]
        for one, (_, two) in zip(heard.values(), names, strict=True):
            assert judge.same_function(one, two).ok, name


@eager64
def test_what_a_tap_puts_in_goes_on():
    q, k, v = (jnp.asarray(x) for x in arrays())
    rules = Rules(dropout=DropoutMask(KEPT, 0.5)).bind(SIZES, H)
    for asked in ("scores", "weights", "keep"):

        def zeros(name, value, asked=asked):
            return jnp.zeros_like(value) if name == asked else None

        with taps.listen(zeros):
            o, lse = jax.jit(lambda *given: reference.forward(*given))(q, k, v, rules)
        if asked == "scores":
            assert judge.same_function(lse, np.full((B, N, T), np.log(S))).ok
        else:
            assert not np.asarray(o).any() and np.asarray(lse).any()


@eager64
def test_dropout_draws_for_every_place():
    q, k, v = (jnp.asarray(x) for x in arrays())
    drop = Dropout(0.4, jax.random.key(3))
    (o, _), heard = listened(q, k, v, Rules(dropout=drop).bind(SIZES, H))
    kept = np.asarray(jax.jit(lambda drop: drop.grid(SIZES))(drop))
    assert judge.exact(heard["keep"], kept).ok
    assert judge.same_function(o, by_loops(*arrays(), keep=kept, rate=0.4)[0]).ok


# The softmax.


def test_the_softmax_by_numbers_that_are_exact():
    zero, low, inf = [0.0, 0.0], [-np.inf, -np.inf], [np.log(3.0), -np.inf]
    got, lse = reference.softmax_and_lse(jnp.asarray([zero, low, inf], jnp.float32))
    assert got.tolist() == [[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]]
    assert lse.tolist() == [np.log(np.float32(2)), -np.inf, np.log(np.float32(3))]
    assert reference.softmax(jnp.asarray(zero)).tolist() == [0.5, 0.5]


@eager64
def test_the_softmax_neither_overflows_nor_vanishes():
    for shift in (1e4, -1e4, 0.0):
        scores = normal(7, 3, 5) + shift
        powers = np.exp(scores - shift)
        weights, lse = jax.jit(reference.softmax_and_lse)(scores)
        assert judge.same_function(weights, np.exp(scores - lse[:, None])).ok
        assert judge.same_function(np.exp(lse - shift), powers.sum(-1)).ok


@eager64
def test_sinks_join_the_sum_alone():
    scores, low = normal(8, 2, 3, 5), np.full((2, 3, 5), -np.inf)
    for sinks in (normal(9, 3, 1), normal(9, 3, 1) + 1e4, normal(9, 3, 1) - 1e4):
        most = np.maximum(scores.max(-1), sinks[..., 0])
        total = np.exp(scores - most[..., None]).sum(-1) + np.exp(sinks[..., 0] - most)
        given = jnp.asarray(sinks[None, :, 0])
        weights, lse = reference.softmax_and_lse(jnp.asarray(scores), given)
        assert judge.same_function(lse, most + np.log(total)).ok
        want = np.exp(scores - (most + np.log(total))[..., None])
        assert judge.same_function(weights, want, scale=1.0).ok
        assert judge.exact(reference.softmax(jnp.asarray(scores), given), weights).ok
        weights, lse = reference.softmax_and_lse(jnp.asarray(low), given)
        assert not weights.any() and judge.exact(lse, np.broadcast_to(given, (2, 3))).ok
    none = jnp.full((1, 3), -np.inf)
    weights, lse = reference.softmax_and_lse(jnp.asarray(low), none)
    assert not weights.any() and jnp.isneginf(lse).all()


def test_narrow_scores_are_widened_and_given_back_narrow():
    for kind in (jnp.bfloat16, jnp.float16):
        narrow = jnp.asarray(3 * normal(10, 3, 7), kind)
        sinks = jnp.asarray(normal(11, 3), jnp.float16)
        for given in (None, sinks):
            weights, lse = reference.softmax_and_lse(narrow, given)
            wide = reference.softmax_and_lse(
                narrow.astype(jnp.float32), None if given is None else given.astype(jnp.float32)
            )
            assert judge.exact(weights, wide[0]).ok and judge.exact(lse, wide[1]).ok
            assert judge.exact(reference.softmax(narrow, given), weights.astype(kind)).ok


@eager64
def test_fully_masked_rows_have_zero_gradients():
    scores = np.where(np.arange(3)[:, None] == 1, -np.inf, normal(12, 3, 5))
    loss = lambda x: (reference.softmax(x) * normal(13, 3, 5)).sum()  # noqa: E731
    p, c = np.asarray(reference.softmax(jnp.asarray(scores))), normal(13, 3, 5)
    want = p * (c - (p * c).sum(-1, keepdims=True))
    got = jax.jit(jax.grad(loss))(scores)
    assert not got[1].any() and judge.same_function(got, want).ok


# Dtypes, sizes that are zero, silence.


def test_products_are_summed_in_float32_and_the_output_has_the_dtype_of_the_query():
    rules = Rules(scale=1.0).bind(Sizes((1,), 2, 1, 2), 2)
    q = jnp.asarray([[[[16.0, 1.0], [1.0, 16.0]]]], jnp.bfloat16)  # 1 T N H
    k = jnp.asarray([[[[16.0, 1.0]], [[0.0, 1.0]]]], jnp.bfloat16)  # 1 S K H
    (o, lse), heard = listened(q, k, k, rules)
    scores = heard["scores"]
    assert scores.dtype == lse.dtype == heard["weights"].dtype == jnp.float32
    assert scores.tolist() == [[[[257.0, 1.0]], [[32.0, 16.0]]]]
    assert o.dtype == jnp.bfloat16 and o[0, 0, 0].tolist() == [16.0, 1.0]


def test_attention_over_no_keys_is_zero():
    q, k, v = np.ones((1, 3, N, H)), np.ones((1, 0, K, H)), np.ones((1, 0, K, h))
    rules = Rules(mask=Causal()).bind(Sizes((1,), N, 3, 0), H)
    o, lse = jax.device_get(jax.jit(reference.forward)(q, k, v, rules))
    assert o.shape == (1, 3, N, h) and lse.shape == (1, N, 3)
    assert not o.any() and np.isneginf(lse).all()


@eager64
def test_zero_unseen_zeroes_rows_and_keys_that_are_masked():
    q, k, v = (jnp.asarray(x) for x in arrays())
    full = Rules().bind(SIZES, H)
    assert all(a is b for a, b in zip(reference.zero_masked(q, k, v, full), (q, k, v), strict=True))
    masks = [(Dense(ragged()), ragged()), (Lengths(np.asarray([3, 7, 0])), SHORT)]
    for mask, seen in [*masks, (Causal(1), CAUSAL), (Causal(-2), CAUSAL & False)]:
        if mask == Causal(-2):
            seen = np.broadcast_to(np.arange(S) <= np.arange(T)[:, None] - 2, (B, N, T, S))
        sees = seen.any(3).swapaxes(1, 2)[..., None]
        keys = [
            [[seen[b, n * G : n * G + G, :, s].any() for n in range(K)] for s in range(S)]
            for b in range(B)
        ]
        keys = np.asarray(keys)[..., None]
        got = jax.jit(reference.zero_masked)(q, k, v, Rules(mask=mask).bind(SIZES, H))
        assert judge.exact(got[0], np.where(sees, q, 0.0)).ok
        assert judge.exact(got[1], np.where(keys, k, 0.0)).ok
        assert judge.exact(got[2], np.where(keys, v, 0.0)).ok


@eager64
def test_masked_nan_changes_no_output():
    q, k, v = arrays()
    seen = np.asarray(ragged())
    rules, dirty = Rules(mask=Dense(ragged())).bind(SIZES, H), [x.copy() for x in (q, k, v)]
    dirty[0][1, 3, 2] = dirty[0][2, 4] = np.nan
    dirty[1][0, 5, 1] = dirty[2][0, 5, 1] = np.inf
    assert not seen[2, :, 4].any() and not seen[0, 2:4, :, 5].any()
    clean, got = (jax.jit(reference.forward)(*x, rules) for x in ((q, k, v), dirty))
    assert judge.exact(got[0], clean[0]).ok and judge.exact(got[1], clean[1]).ok
