"""`attend_by_weights` equals `attend` by default; other normalisers and mixing of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Alibi,
    Dense,
    Dropout,
    Lengths,
    Softcap,
    attend,
    attend_by_weights,
    entmax,
    sigmoid,
    taps,
)
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal

pytestmark = pytest.mark.nightly

B, T, S, N, K, H, h = 2, 5, 7, 6, 3, 4, 8
Q, KEYS, V = (normal(i, B, *shape) for i, shape in enumerate([(T, N, H), (S, K, H), (S, K, h)]))
RAGGED = np.random.RandomState(0).rand(B, N, T, S) < 0.5
RAGGED[1, 2, 3] = False
ASKED = {
    "nothing": {},
    "a mask": {"mask": CAUSAL},
    "a mask of each head": {"mask": RAGGED, "scale": 0.3},
    "a score": {"score": Softcap(1.5) >> Alibi(np.arange(N) / N), "mask": Lengths(4)},
    "dropout": {"dropout": Dropout(0.5, jax.random.key(0)), "mask": RAGGED},
}


def values_and_gradients(f):
    return differentiated(f)(Q, KEYS, V)


def differentiated(f):
    """The output and all gradients as one program."""

    @jax.jit
    def run(*given):
        o, back = jax.vjp(f, *given)
        return o, *back(jnp.asarray(normal(9, *o.shape)))

    return run


def same(got, want):
    return all(
        judge.same_function(*map(np.asarray, pair)).ok for pair in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_by_weights_with_softmax_equals_attend(asked):
    mine, theirs = (
        values_and_gradients(lambda *x, f=f: f(*x, **asked)) for f in (attend_by_weights, attend)
    )
    assert same(mine, theirs)


def by_hand(q, k, v, normalise, before, after, seen):
    """One batch entry after the other, all heads at once, in the plainest words."""
    k, v = (jnp.repeat(x, N // K, axis=-2) for x in (k, v))
    logits = before @ jnp.einsum("btnh,bsnh->bnts", q, k).reshape(B, N, -1) / 2
    weights = jnp.where(seen, normalise(logits.reshape(B, N, T, S)), 0)
    weights = (after @ weights.reshape(B, N, -1)).reshape(B, N, T, S)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("normalise", [sigmoid, lambda x: jax.nn.softmax(x, -1)])
def test_heads_are_mixed_before_the_mask_and_after_the_weights(normalise):
    before, after = (jnp.asarray(normal(i, N, N)) for i in (5, 6))

    def mixed(by):
        return lambda x: jnp.einsum("nm,bmts->bnts", by, x)

    def mine(*x):
        how = {"mix_scores": mixed(before), "mix_weights": mixed(after), "normalise": normalise}
        return attend_by_weights(*x, **how)

    every = jnp.ones((T, S), bool)
    plain = values_and_gradients(lambda *x: by_hand(*x, normalise, before, after, every))
    assert same(values_and_gradients(mine), plain)


def test_masks_are_evaluated_for_the_heads_after_mixing():
    """A head's keys are read by all heads, and a bias reaches no weight that is hidden."""
    before, after = (jnp.asarray(normal(i, N, N)) for i in (5, 6))

    def mine(q, k, v):
        how = {
            "mix_scores": lambda x: jnp.einsum("nm,bmts->bnts", before, x),
            "mix_weights": lambda x: jnp.einsum("nm,bmts->bnts", after, x) + 0.7,
        }
        return attend_by_weights(q, k, v, mask=seen, **how)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, N // K, axis=-2) for x in (k, v))
        logits = jnp.einsum("nm,btmh,bsmh->bnts", before, q, k) / 2
        exps = jnp.where(seen, jnp.exp(logits), 0)
        rows = exps.sum(-1, keepdims=True)
        weights = exps / jnp.where(rows == 0, 1, rows)
        weights = jnp.where(seen, jnp.einsum("nm,bmts->bnts", after, weights) + 0.7, 0)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    seen = RAGGED.copy()
    seen[:, 4:, :, 2] = False  # hidden from both heads of a key head that other heads read
    assert same(values_and_gradients(mine), values_and_gradients(plain))


@pytest.mark.parametrize("normalise", [sigmoid, entmax, jnp.exp])
def test_masked_values_affect_no_output_or_gradient(normalise):
    seen = np.ones((B, 1, T, S), bool)
    seen[..., 2] = seen[1, :, 3] = False
    q, k, v = Q.copy(), KEYS.copy(), V.copy()
    q[1, 3], k[:, 2], v[:, 2] = np.inf, np.nan, np.nan

    def f(*x):
        return attend_by_weights(*x, mask=Dense(seen), normalise=normalise)

    run = differentiated(f)
    got = [np.asarray(x) for x in run(q, k, v)]
    assert same(got, run(Q, KEYS, V))
    assert not got[0][1, 3].any() and not got[1][1, 3].any() and not got[2][:, 2].any()


def test_taps_record_each_step_by_weights():
    with taps.listen() as heard:
        attend_by_weights(Q, KEYS, V, normalise=entmax, mask=CAUSAL)
    assert [name for name, _ in heard] == ["query", "key", "value", "scores", "weights", "context"]
    weights = dict(heard)["weights"]
    assert (
        weights.shape == (B, N, T, S)
        and judge.same_function(weights.sum(-1), np.ones((B, N, T))).ok
    )


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="The key/value heads must divide the query heads"):
        attend_by_weights(Q[:, :, :4], KEYS, V)
    with pytest.raises(ValueError, match=r"normalise must keep the shape B N T S; got \(2, 6, 5\)"):
        attend_by_weights(Q, KEYS, V, normalise=lambda x: x.sum(-1))
    with pytest.raises(TypeError, match="A mask must be"):
        attend_by_weights(Q, KEYS, V, mask=jnp.zeros((T, S)))
