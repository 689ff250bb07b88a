"""Normalisers other than softmax, against the package entmax and a bisection."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flax_attn import entmax, sigmoid
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

ALPHAS = (1.5, 2)


def scores(spread=1.0):
    """Rows with ties, a hidden part, and one that can see a single key."""
    x = normal(0, 3, 6, 9) * spread
    x[0, 0, 3:] = x[2, 5, 1:] = -np.inf
    x[1, 1] = 1.0
    x[2, :2, :4] = 2.0
    return x


def by_halves(row, alpha):
    """Weights of one row, their tau searched between two bounds of which one is too low."""
    z = (alpha - 1) * row[row > -np.inf]

    def weights(tau):
        return np.maximum(z - tau, 0) ** (1 / (alpha - 1))

    low, high = z.max() - 1, z.max()
    for _ in range(80):
        tau = (low + high) / 2
        low, high = (tau, high) if weights(tau).sum() > 1 else (low, tau)
    found = np.zeros_like(row)
    found[row > -np.inf] = weights((low + high) / 2)
    return found


@partial(jax.jit, static_argnums=0)
def both_ways(alpha, x, cotangent):
    """The weights and the gradient of the scores."""
    y, back = jax.vjp(lambda x: entmax(x, alpha), x)
    return y, back(cotangent)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_is_what_its_definition_says(alpha, spread):
    x = scores(spread)
    want = np.stack([by_halves(row, alpha) for row in x.reshape(-1, 9)]).reshape(x.shape)
    assert judge.same_function(np.asarray(entmax(jnp.asarray(x), alpha)), want).ok


@pytest.mark.nightly(but=["1.5-0.1", "2-0.1"])
@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_entmax_and_its_gradient_are_the_packages(alpha, spread):
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    package = pytest.importorskip("entmax", reason="the witness")
    x, cotangent = scores(spread), normal(1, 3, 6, 9)
    given = torch.tensor(x, requires_grad=True)
    theirs = (package.entmax15 if alpha == 1.5 else package.sparsemax)(given, dim=-1)
    theirs.backward(torch.tensor(cotangent))
    y, dx = both_ways(alpha, x, cotangent)
    assert judge.same_function(np.asarray(y), theirs.detach().numpy()).ok
    assert judge.same_function(np.asarray(dx), given.grad.numpy()).ok


@pytest.mark.nightly
@pytest.mark.parametrize("alpha", with_nightly(ALPHAS, commit=2))
def test_gradients_are_differences_forward_and_twice(alpha):
    x = jnp.asarray(normal(2, 4, 5))
    check_grads(jax.jit(lambda x: entmax(x, alpha)), (x,), order=2, eps=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("normalise", [sigmoid, entmax, lambda x: entmax(x, 2)])
def test_a_fully_masked_row_has_zero_weights_and_gradients(normalise):
    x = jnp.full((2, 3), -jnp.inf)
    y, back = jax.vjp(normalise, x)
    assert not y.any() and not back(jnp.ones_like(y))[0].any()
    assert normalise(jnp.zeros((2, 0))).shape == (2, 0)


@pytest.mark.nightly
@pytest.mark.parametrize("alpha", ALPHAS)
def test_one_number_on_all_scores_changes_nothing(alpha):
    x = jnp.asarray(scores())
    assert judge.same_function(np.asarray(entmax(x + 1e3, alpha)), np.asarray(entmax(x, alpha))).ok


@pytest.mark.nightly
def test_bfloat16_is_computed_in_float32():
    x = jnp.asarray(normal(3, 7, 40), jnp.bfloat16)
    for normalise in (sigmoid, entmax):
        wide = normalise(x.astype(jnp.float32)).astype(jnp.bfloat16)
        assert judge.exact(np.asarray(normalise(x)), np.asarray(wide)).ok


def test_another_alpha_is_refused():
    with pytest.raises(ValueError, match=r"alpha must be one of 1.5, 2; got 1"):
        entmax(jnp.zeros(3), 1)
