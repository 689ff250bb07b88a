"""What is hidden changes nothing: huge numbers and NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Additive,
    Dense,
    Softcap,
    attend,
)
from flax_attn.parity import judge

pytestmark = pytest.mark.nightly

BACKENDS = ("reference", "blockwise")
B, T, N, H = 2, 12, 3, 4
HUGE = 3e38


def drawn(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), dtype)


def arrays():
    return drawn(0, B, T, N, H), drawn(1, B, T, N, H), drawn(2, B, T, N, H)


def changed(x, at, value):
    """A copy with a number elsewhere, in every batch entry."""
    x = np.array(x)
    x[:, at] = value
    return x


def same(a, b):
    return all(
        judge.exact(np.asarray(x), np.asarray(y)).ok
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_huge_value_that_later_rows_see_leaves_earlier_ones_alone(backend):
    q, k, v = arrays()

    @jax.jit
    def gradients(v):
        def loss(q, k, v):
            return jnp.sum(attend(q, k, v, mask=CAUSAL, backend=backend)[:, : T - 1])

        return jax.grad(loss, (0, 1))(q, k, v)

    assert same(gradients(v), gradients(changed(v, -1, HUGE)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["mask", "additive"])
def test_a_cotangent_of_a_row_that_sees_nothing_goes_nowhere(backend, by):
    seen = np.tri(T, dtype=bool)
    seen[3] = False
    how = {
        "mask": {"mask": Dense(seen), "sinks": drawn(3, N)},
        "additive": {"score": Additive(np.where(seen, np.float32(0), -np.inf))},
    }[by]

    @jax.jit
    def back(cotangent):
        return jax.vjp(lambda *x: attend(*x, **how, backend=backend), *arrays())[1](cotangent)

    cotangent = drawn(4, B, T, N, H)
    assert same(*(back(changed(cotangent, 3, x)) for x in (np.nan, 0)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_that_is_nan_where_nobody_looks_reaches_nothing(backend):
    """Through a softcap, whose derivative at NaN is NaN."""
    bias = drawn(5, B, N, T, T)
    hidden = ~np.tri(T, dtype=bool)

    @jax.jit
    def gradients(bias):
        def loss(q, k, v, bias):
            score = Additive(bias) >> Softcap(2.0)
            o, lse = attend(*(q, k, v), mask=CAUSAL, score=score, backend=backend, return_lse=True)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(lse))

        return jax.grad(loss, (0, 1, 2, 3))(*arrays(), bias)

    assert same(gradients(bias), gradients(np.where(hidden, np.float32(np.nan), bias)))
