"""Masking after the softmax, rows made whole again, is masking with -inf before it; and where not.

    (e_s / sum e) * m_s / sum(e * m / sum e) = e_s m_s / sum(e * m)

The denominator over everybody cancels, in the values and in their gradients: nothing of the future
is left. In floating point the two part where a denominator is nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    CausalAttention,
    CausalRenormalisedAttention,
    DropoutMask,
    attend,
    reference,
)
from flax_attn.parity import judge

pytestmark = pytest.mark.nightly

SIZES = [(1, 1, 3), (2, 7, 5), (7, 7, 7), (3, 40, 6), (7, 11, 4)]  # T, S, H
RATE = 0.25


def drawn(seed, *shapes):
    random = np.random.RandomState(seed)
    return [jnp.asarray(random.standard_normal(shape)) for shape in shapes]


def erased(scores, seen):
    """Softmax over everybody, then the mask."""
    return jax.nn.softmax(scores, axis=-1) * seen.astype(scores.dtype)


def after(scores, seen):
    """The same, every row over its sum."""
    weights = erased(scores, seen)
    return weights / weights.sum(axis=-1, keepdims=True)


def before(scores, seen):
    return reference.softmax(jnp.where(seen, scores, -jnp.inf))


def seen_of(kind, T, S):
    """Every row may look at something."""
    if kind == "causal":
        return jnp.asarray(np.tri(T, S, dtype=bool))
    seen = np.random.RandomState(T * S).rand(T, S) < 0.4
    seen[np.arange(T), np.arange(T) % S] = True
    return jnp.asarray(seen)


@partial(jax.jit, static_argnums=0)
def differentiated(weigh, seen, q, k, v, cotangent):
    """Context vectors and weights, and the gradients of q, k and v."""

    def context(q, k, v):
        weights = weigh(2.0 * q @ k.T, seen)
        return weights @ v, weights

    out, back, weights = jax.vjp(context, q, k, v, has_aux=True)
    return (out, weights), back(cotangent)


@pytest.mark.parametrize("kind", ["causal", "ragged"])
@pytest.mark.parametrize(("T", "S", "H"), SIZES)
def test_after_is_before_in_values_and_gradients(kind, T, S, H):
    """The weights, the context vectors, and the gradients of scores, values and keys."""
    with jax.enable_x64(True):
        given = drawn(T + S, (T, H), (S, H), (S, H), (T, H))
        found = (differentiated(weigh, seen_of(kind, T, S), *given) for weigh in (after, before))
        (got, got_grads), (want, want_grads) = jax.tree.map(np.asarray, [*found])
    for a, b in zip(got, want, strict=True):
        assert judge.same_function(a, b).ok
    for a, b in zip(got_grads, want_grads, strict=True):
        assert judge.same_function(a, b, judge.gradient_scale(want_grads, b)).ok


def test_after_is_the_one_verb():
    with jax.enable_x64(True):
        q, k, v = drawn(0, (7, 1, 5), (7, 1, 5), (7, 1, 5))
        scores = q[:, 0] @ k[:, 0].T / 5**0.5
        got = after(scores, seen_of("causal", 7, 7)) @ v[:, 0]
        want = attend(q, k, v, mask=CAUSAL)[:, 0]
    assert judge.same_function(np.asarray(got), np.asarray(want)).ok


@pytest.mark.parametrize("T", [1, 5, 9])
def test_the_layers_are_one_function(T):
    with jax.enable_x64(True):
        x, cotangent = drawn(T, (2, T, 11), (2, T, 6))

        def run(kind):
            layer = kind(11, 6, 9, 0.0, True, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            graph, params, rest = nnx.split(layer, nnx.Param, ...)

            @jax.jit
            def both_ways(params, x):
                f = lambda params, x: nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
                out, back = jax.vjp(f, params, x)
                return out, jax.tree.leaves(back(cotangent))

            return jax.tree.map(np.asarray, both_ways(params, x))

        (got, got_grads), (want, want_grads) = map(
            run, (CausalRenormalisedAttention, CausalAttention)
        )
    assert judge.same_function(got, want).ok
    for a, b in zip(got_grads, want_grads, strict=True):
        assert judge.same_function(a, b, judge.gradient_scale(want_grads, b)).ok


def test_the_future_has_no_gradient():
    """Exactly none before the softmax; after it, what rounding leaves of a cancelled sum."""
    with jax.enable_x64(True):
        scores, cotangent = drawn(4, (6, 6), (6, 6))
        seen = seen_of("causal", 6, 6)
        late, early = (
            np.asarray(jax.vjp(lambda s, w=weigh: w(s, seen), scores)[1](cotangent)[0])
            for weigh in (after, before)
        )
    future = ~np.asarray(seen)
    assert not early[future].any()
    nothing = np.zeros_like(late[future])
    assert judge.same_function(late[future], nothing, float(np.linalg.norm(early))).ok


def test_dropout_before_renormalising_is_another_function():
    """The same keep mask: dropped after, rows no longer sum to one; dropped before, they do."""
    with jax.enable_x64(True):
        scores, v = drawn(5, (7, 7), (7, 4))
        seen, keep = (
            seen_of("causal", 7, 7),
            jnp.asarray(np.random.RandomState(5).rand(7, 7) > RATE),
        )
        keep = keep | jnp.eye(7, dtype=bool)
        drop = DropoutMask(keep, RATE)
        last = drop.apply(after(scores, seen), keep)
        first = drop.apply(erased(scores, seen), keep)
        first = first / first.sum(axis=-1, keepdims=True)
        standard = drop.apply(before(scores, seen), keep)
        last, first, standard = (np.asarray(w @ v) for w in (last, first, standard))
        sums = np.asarray(drop.apply(after(scores, seen), keep).sum(axis=-1))
    assert judge.same_function(last, standard).ok
    assert not judge.same_function(first, standard).ok
    assert not judge.same_function(sums, np.ones(7)).ok


def test_dropout_before_renormalising_is_masking_by_the_kept():
    """Its rate cancels: what is left is attention over the survivors alone."""
    with jax.enable_x64(True):
        (scores,) = drawn(6, (7, 7))
        seen = seen_of("causal", 7, 7)
        keep = jnp.asarray(np.random.RandomState(6).rand(7, 7) > RATE) | jnp.eye(7, dtype=bool)
        first = DropoutMask(keep, RATE).apply(erased(scores, seen), keep)
        first = first / first.sum(axis=-1, keepdims=True)
        want = before(scores, seen & keep)
    assert judge.same_function(np.asarray(first), np.asarray(want)).ok


def test_a_row_that_may_look_at_nothing_is_zero_over_zero():
    """NaN after the softmax; zero weights, output and gradients before it; other rows the same."""
    with jax.enable_x64(True):
        scores, cotangent = drawn(7, (5, 7), (5, 7))
        seen = seen_of("ragged", 5, 7).at[2].set(False)
        (late, _), (early, back) = (
            jax.vjp(lambda s, w=weigh: w(s, seen), scores) for weigh in (after, before)
        )
        late, early, gradient = (np.asarray(x) for x in (late, early, back(cotangent)[0]))
    assert np.isnan(late[2]).all()
    assert not early[2].any() and not gradient[2].any()
    others = np.arange(5) != 2
    assert judge.same_function(late[others], early[others]).ok
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("dtype", "far"), [("float32", 200.0), ("float64", 2000.0)])
def test_a_future_that_is_much_larger_leaves_zero_over_zero(dtype, far):
    """The past underflows beside it, and cannot be made whole: only the -inf mask survives that."""
    with jax.enable_x64(dtype == "float64"):
        scores = jnp.asarray([[0.0, far], [0.0, 1.0]], dtype)
        seen = seen_of("causal", 2, 2)
        late, early = (np.asarray(weigh(scores, seen)) for weigh in (after, before))
    assert np.isnan(late[0]).all() and np.isfinite(late[1]).all()
    assert (early[0] == [1, 0]).all()


def test_a_future_that_is_larger_costs_no_digits():
    """Until it underflows, the quotient of small numbers is as good as that of large ones."""
    with jax.enable_x64(True):
        (scores,) = drawn(8, (6, 6))
        seen = seen_of("causal", 6, 6)
        scores = jnp.where(seen, scores, scores + 600.0)
        late, early = (np.asarray(weigh(scores, seen)) for weigh in (after, before))
    assert judge.same_function(late, early).ok
