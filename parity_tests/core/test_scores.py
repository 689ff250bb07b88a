"""Scores and dropout against numpy: values, gradients of their parameters, blocks, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Dropout, Keep, additive, alibi, alibi_slopes, attend, modify, softcap
from flax_attn._types import Sizes
from flax_attn.dropout import AttentionDropout
from flax_attn.parity import judge

B, N, T, S = 2, 3, 5, 7
SIZES = Sizes((B,), N, T, S)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def normal(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape)


LOGITS = 3 * normal(0, B, N, T, S)
BIAS, SLOPES = normal(1, N, T, S), np.asarray([0.5, 0.2, 0.9])
DISTANCE = np.abs(np.arange(T)[:, None] - np.arange(S))


def per_head(params, x, b, n, q, k):
    return x * params[n] + (q - 2 * k + b).astype(x.dtype)


SCORES = {
    "softcap": (softcap(2.0), 2 * np.tanh(LOGITS / 2)),
    "alibi": (alibi(SLOPES), LOGITS - SLOPES[:, None, None] * DISTANCE),
    "additive": (additive(BIAS), LOGITS + BIAS),
    "modify": (
        modify(per_head, SLOPES),
        LOGITS * SLOPES[:, None, None]
        + np.arange(T)[:, None]
        - 2 * np.arange(S)
        + np.arange(B)[:, None, None, None],
    ),
    "cap then bias": (softcap(2.0) >> additive(BIAS), 2 * np.tanh(LOGITS / 2) + BIAS),
    "bias then cap": (additive(BIAS) >> softcap(2.0), 2 * np.tanh((LOGITS + BIAS) / 2)),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_their_formula(name):
    score, want = SCORES[name]
    bound = score.bind(SIZES)
    logits = jnp.asarray(LOGITS)
    assert judge.same_function(bound.grid(logits, SIZES), want).ok
    b, n, q, k = SIZES.grid()
    block = bound(logits[1:, :, 2:4, 3:], b[1:], n, q[:, :, 2:4], k[..., 3:])
    assert judge.same_function(block, want[1:, :, 2:4, 3:]).ok


def test_alibi_from_the_end():
    got = alibi(SLOPES, offset="end").bind(SIZES).grid(jnp.asarray(LOGITS), SIZES)
    distance = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    assert judge.same_function(got, LOGITS - SLOPES[:, None, None] * distance).ok


def test_gradients_reach_every_parameter():
    c = normal(2, B, N, T, S)

    def gradient(make, at):
        loss = lambda p: jnp.sum(c * make(p).bind(SIZES).grid(jnp.asarray(LOGITS), SIZES))  # noqa: E731
        return jax.grad(loss)(jnp.asarray(at))

    u = LOGITS / 2.0
    by_cap = np.sum(c * (np.tanh(u) - u / np.cosh(u) ** 2))
    assert judge.same_function(gradient(softcap, 2.0), by_cap).ok
    assert judge.same_function(gradient(alibi, SLOPES), -np.sum(c * DISTANCE, axis=(0, 2, 3))).ok
    assert judge.same_function(gradient(additive, BIAS), c.sum(axis=0)).ok
    by_head = np.sum(c * LOGITS, axis=(0, 2, 3))
    assert judge.same_function(gradient(lambda p: modify(per_head, p), SLOPES), by_head).ok


def test_an_additive_row_of_minus_infinity_is_a_row_that_sees_nothing():
    q, k = jnp.asarray(normal(3, T, N, 4)), jnp.asarray(normal(4, S, N, 4))
    o, lse = attend(
        q,
        k,
        k,
        score=additive(np.where(np.arange(T)[:, None] == 2, -np.inf, BIAS)),
        return_lse=True,
    )
    assert not o[2].any() and jnp.isneginf(lse[2]).all() and jnp.isfinite(o).all()


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: softcap(0.0), ValueError, "above zero; got 0.0"),
        (lambda: additive(np.ones((2, 2), bool)), TypeError, "mask="),
        (
            lambda: additive(np.ones((T, S + 1))).bind(SIZES),
            ValueError,
            r"\(2, 3, 5, 7\).*\(5, 8\)",
        ),
        (lambda: alibi(np.ones(4)).bind(SIZES), ValueError, r"\(3,\).*\(4,\)"),
        (lambda: alibi(np.ones(3), offset="start"), ValueError, '"end"'),
        (
            lambda: modify(lambda x, b, n, q, k: x[0]).bind(SIZES).grid(jnp.asarray(LOGITS), SIZES),
            ValueError,
            "keep the logits' shape",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def slopes_of_the_paper(n):
    if n & (n - 1) == 0:
        start = 2.0 ** (-(2.0 ** -(np.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]
    less = 2 ** int(np.floor(np.log2(n)))
    return slopes_of_the_paper(less) + slopes_of_the_paper(2 * less)[::2][: n - less]


@pytest.mark.parametrize("n", range(1, 18))
def test_alibi_slopes_are_the_papers(n):
    want = np.asarray(slopes_of_the_paper(n))
    assert judge.printed(alibi_slopes(n), want) and len(want) == n


# Dropout.


def test_dropout_is_drawn_by_place():
    drop = Dropout(0.4, jax.random.key(3))
    whole = drop.grid(SIZES)
    b, n, q, k = SIZES.grid()
    block = drop.keep(b[1:], n[:, :2], q[:, :, 2:4], k[..., 3:])
    assert (block == whole[1:, :2, 2:4, 3:]).all()
    longer = drop.grid(Sizes((2, B), N, T + 3, S + 2))
    assert (longer[:B, :, :T, :S] == whole).all()
    assert (whole != Dropout(0.4, jax.random.key(4)).grid(SIZES)).any()
    assert (whole[0] != whole[1]).any() and (whole[:, 0] != whole[:, 1]).any()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_survivors(rate):
    keep = Dropout(rate, jax.random.key(0)).grid(Sizes((4,), 4, 50, 50))
    deviation = np.sqrt(keep.size * rate * (1 - rate))
    assert abs(int(keep.sum()) - keep.size * (1 - rate)) < 5 * deviation


def test_rates_of_zero_and_one():
    q, k = jnp.asarray(normal(3, T, N, 4)), jnp.asarray(normal(4, S, N, 4))
    key = jax.random.key(0)
    assert (attend(q, k, k, dropout=Dropout(0.0, key)) == attend(q, k, k)).all()
    gradient = jax.grad(lambda q: attend(q, k, k, dropout=Dropout(1.0, key)).sum())(q)
    assert not attend(q, k, k, dropout=Dropout(1.0, key)).any() and not gradient.any()


def test_keep_divides_the_survivors():
    q, k = jnp.asarray(normal(3, T, N, 4)), jnp.asarray(normal(4, S, N, 4))
    keep = normal(5, N, T, S) > 0
    weights = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k) / 2, axis=-1)
    want = jnp.einsum("nts,snh->tnh", jnp.where(keep, weights / 0.6, 0), k)
    assert judge.same_function(attend(q, k, k, dropout=Keep(keep, 0.4)), want).ok


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), True, "0.1"])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="from 0 to 1"):
        Dropout(rate, jax.random.key(0))
    with pytest.raises(ValueError, match="from 0 to 1"):
        Keep(np.ones((T, S), bool), rate)


def test_attention_dropout_follows_the_mode():
    from flax import nnx

    dropout = AttentionDropout(0.3, rngs=nnx.Rngs(0))
    one, two = dropout(), dropout()
    assert one is not None and two is not None and one != two
    assert dropout(deterministic=True) is None
    dropout.eval()
    assert dropout() is None and dropout(deterministic=False) is not None
    assert AttentionDropout(0.0, rngs=nnx.Rngs(0))() is None
