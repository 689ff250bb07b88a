"""Rotary positions against complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Rotary
from flax_attn.parity import judge


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def by_complex_numbers(x, positions, base, layout, width):
    """Each pair is a complex number, turned by `exp(i position rate)`."""
    rates = base ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * positions[:, None] * rates)[:, None]
    out = x.copy()
    first, second = (
        (slice(0, width // 2), slice(width // 2, width))
        if layout == "half"
        else (slice(0, width, 2), slice(1, width, 2))
    )
    turned = (x[..., first] + 1j * x[..., second]) * turn
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("far", [False, True])
def test_pairs_are_turned(layout, width, far):
    x = np.random.RandomState(0).standard_normal((2, 5, 3, 10))
    positions = np.asarray([3, 1022, 4096, 0, 7]) if far else np.arange(5)
    rotary = Rotary(500.0, layout, width)
    got = rotary(jnp.asarray(x), jnp.asarray(positions) if far else None)
    want = by_complex_numbers(x, positions, 500.0, layout, width or 10)
    assert got.dtype == jnp.float64 and judge.same_function(got, want).ok


def test_products_depend_on_the_distance_alone():
    x = jnp.asarray(np.random.RandomState(1).standard_normal((2, 1, 6)))
    near, far = (Rotary()(x, jnp.asarray([at, at + 3])) for at in (0, 1000))
    products = [(y[0] * y[1]).sum() for y in (near, far)]
    assert judge.same_function(*products).ok


def test_each_entry_has_its_own_positions():
    x = jnp.asarray(np.random.RandomState(2).standard_normal((2, 5, 3, 4)))
    positions = jnp.asarray([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    both = Rotary()(x, positions)
    for i in range(2):
        assert judge.same_function(both[i], Rotary()(x[i], positions[i])).ok


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(layout="paired"), "interleaved"),
        (lambda: Rotary(width=3), "even count"),
        (lambda: Rotary()(jnp.ones((2, 1, 5))), "got 5"),
        (lambda: Rotary(width=8)(jnp.ones((2, 1, 6))), "got 8"),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
