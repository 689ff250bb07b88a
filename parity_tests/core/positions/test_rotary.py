"""Rotary positions against complex numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Rotary
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64


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


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [None, 4])
@pytest.mark.parametrize("far", [False, True])
def test_pairs_are_rotated_by_position_times_rate(layout, width, far):
    x = np.random.RandomState(0).standard_normal((2, 5, 3, 10))
    positions = np.asarray([3, 1022, 4096, 0, 7]) if far else np.arange(5)
    rotary = Rotary(500.0, layout, width)
    got = rotary(jnp.asarray(x), jnp.asarray(positions) if far else None)
    want = by_complex_numbers(x, positions, 500.0, layout, width or 10)
    assert got.dtype == jnp.float64 and judge.same_function(got, want).ok


@pytest.mark.nightly
def test_products_depend_on_the_distance_alone():
    x = jnp.asarray(np.random.RandomState(1).standard_normal((2, 1, 6)))
    near, far = (Rotary()(x, jnp.asarray([at, at + 3])) for at in (0, 1000))
    products = [(y[0] * y[1]).sum() for y in (near, far)]
    assert judge.same_function(*products).ok


@pytest.mark.nightly
def test_each_entry_has_its_own_positions():
    x = jnp.asarray(np.random.RandomState(2).standard_normal((2, 5, 3, 4)))
    positions = jnp.asarray([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5]])
    both = Rotary()(x, positions)
    for i in range(2):
        assert judge.same_function(both[i], Rotary()(x[i], positions[i])).ok


@pytest.mark.nightly
def test_positions_of_one_row_serve_every_entry():
    x = jnp.asarray(np.random.RandomState(3).standard_normal((2, 3, 5, 1, 6)))
    row = jnp.asarray([4, 0, 9, 1, 1])
    want = Rotary()(x, row)
    for shape in ((1, 5), (1, 1, 5), (3, 5), (2, 1, 5)):
        assert judge.exact(Rotary()(x, jnp.broadcast_to(row, shape)), want).ok


@pytest.mark.nightly
def test_rotary_takes_zero_width_and_zero_tokens():
    x = jnp.asarray(np.random.RandomState(4).standard_normal((2, 5, 1, 6)))
    assert judge.exact(Rotary(width=0)(x), x).ok
    assert Rotary()(x[:, :0]).shape == (2, 0, 1, 6)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrow_inputs_are_rotated_in_float32(dtype):
    x = jnp.asarray(np.random.RandomState(5).standard_normal((5, 3, 8)), dtype)
    far = jnp.arange(5) + 1022
    got = Rotary()(x, far)
    assert got.dtype == jnp.dtype(dtype)
    assert judge.exact(got, Rotary()(x.astype(jnp.float32), far).astype(dtype)).ok


@pytest.mark.nightly
def test_a_rotation_keeps_norms_and_its_gradient_is_the_inverse():
    x, c = (jnp.asarray(np.random.RandomState(s).standard_normal((5, 3, 8))) for s in (6, 7))
    out, back = jax.vjp(Rotary(layout="interleaved"), x)
    assert judge.same_function((out**2).sum(-1), (x**2).sum(-1)).ok
    there_and_back = Rotary(layout="interleaved")(back(c)[0])
    assert judge.same_function(there_and_back, c).ok


def test_equal_rotaries_are_equal():
    assert Rotary(width=4) == Rotary(width=4) != Rotary(width=6)
    assert hash(Rotary(width=4)) == hash(Rotary(width=4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(layout="paired"), "interleaved"),
        (lambda: Rotary(width=3), "even count"),
        (lambda: Rotary()(jnp.ones((2, 1, 5))), "got 5"),
        (lambda: Rotary(width=8)(jnp.ones((2, 1, 6))), "got 8"),
        (lambda: Rotary(base=0.0), "base must be above zero; got 0.0"),
        (lambda: Rotary()(jnp.ones((2, 5, 1, 6)), jnp.arange(3)), r"\(2, 5\); got shape \(3,\)"),
        (lambda: Rotary()(jnp.ones((2, 5, 1, 6)), jnp.arange(1)), r"\(2, 5\); got shape \(1,\)"),
        (lambda: Rotary()(jnp.ones((5, 1, 6)), jnp.ones((1, 5), int)), r"\(5,\); got shape"),
    ],
)
def test_wrong_shapes_are_named_in_the_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()
