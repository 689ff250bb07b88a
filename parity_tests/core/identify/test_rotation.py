"""Rotations told from bilinear forms: those of our own `Rotary`, by hand, and none at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Frequencies, LinearScaling, Proportional, Rotary, Yarn
from flax_attn.identify.rotation import Rotation, rotation_of
from flax_attn.positions.scaling import plain_rates
from parity_tests.tables import each

TOKENS: tuple[int, ...] = (0, 1, 2, 5, 11, 30)
PAIRS = tuple((t, s) for t in TOKENS for s in TOKENS if s <= t)
NOISE = 1e-14


def forms_of_rotary(rotary, head_dim, scale, noise=None):
    """The forms of queries and keys that both go through a `Rotary`, in float64."""
    with jax.enable_x64(True):
        units = jnp.asarray(np.tile(np.eye(head_dim), (len(TOKENS), 1, 1)))
        rotated = np.asarray(rotary(units, jnp.asarray(TOKENS)))
    rotated = dict(zip(TOKENS, rotated, strict=True))
    forms = {(t, s): scale * rotated[t] @ rotated[s].T for t, s in PAIRS}
    return forms if noise is None else with_noise(forms, noise)


def with_noise(forms, rng):
    largest = max(np.abs(x).max() for x in forms.values())
    return {k: x + NOISE * largest * rng.standard_normal(x.shape) for k, x in forms.items()}


def by_hand(rates, head_dim, pairs=PAIRS, components=None, radius=1.0):
    """Forms by the formula; `components` are the pairs, by default interleaved."""
    forms = {}
    for t, s in pairs:
        form = np.eye(head_dim)
        for p, rate in enumerate(rates):
            i, j = (2 * p, 2 * p + 1) if components is None else components[p]
            cos, sin = np.cos((t - s) * rate), np.sin((t - s) * rate)
            form[np.ix_((i, j), (i, j))] = radius * np.array([[cos, sin], [-sin, cos]])
        forms[t, s] = form
    return forms


def clear_rotation(forms, usual_scale=None):
    rotation = rotation_of(forms, usual_scale)
    assert isinstance(rotation, Rotation)
    return rotation


def drawn_rotary(rng, head_dim):
    """A rotary of few sizes, and its rates."""
    width = [None, 8][rng.randint(2)] if head_dim % 2 == 0 else 8
    pairs = (width or head_dim) // 2
    direction = {
        "layout": str(rng.choice(["half", "interleaved"])),
        "reverse": bool(rng.randint(2)),
    }
    scaling = [
        None,
        LinearScaling(8.0),
        Yarn(4.0, 64),
        Proportional(0.5),
        Frequencies(rng.uniform(0.001, 3, pairs), attention_factor=1.25),
    ][rng.randint(5)]
    base = float(rng.choice([100, 1e4, 5e5]))
    if isinstance(scaling, Frequencies):
        return Rotary(scaling=scaling, **direction), scaling.values
    rates = plain_rates(base, 2 * pairs) if scaling is None else scaling.rates(base, 2 * pairs)
    return Rotary(base, width=width, scaling=scaling, **direction), rates


@pytest.mark.nightly
@each("seed", range(24))
def test_a_rotary_is_told_from_its_forms(seed):
    rng = np.random.RandomState(seed)
    head_dim = [16, 9][rng.randint(2)]
    rotary, rates = drawn_rotary(rng, head_dim)
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    scale = float(rng.choice([head_dim**-0.5, 0.3]))
    rotation = clear_rotation(forms_of_rotary(rotary, head_dim, scale, noise=rng))
    if rotary.layout == "interleaved" and magnitude == 1:
        rates = rates[: np.flatnonzero(rates)[-1] + 1]  # zeros at the end are no rotation
    assert (rotation.layout, rotation.reverse) == (rotary.layout, rotary.reverse)
    assert rotation.width == 2 * len(rates)
    assert np.abs(rotation.rates - rates).max() <= rotation.precision == 1e-13 / 30
    assert ((rotation.rates == 0) == (rates == 0)).all()
    whole = rotation.width == head_dim  # where the magnitude is in the scale
    np.testing.assert_allclose(rotation.magnitude, 1.0 if whole else magnitude)
    np.testing.assert_allclose(rotation.scale, scale * magnitude**2 if whole else scale)


def test_every_pair_of_a_wide_head_is_as_precise_as_the_largest_distance_allows():
    rates = plain_rates(5e5, 128)
    near = with_noise(by_hand(rates, 128, [(1, 0), (2, 0)]), np.random.RandomState(0))
    far = with_noise(by_hand(rates, 128, [(1, 0), (2, 0), (400, 0)]), np.random.RandomState(0))
    errors = [np.abs(clear_rotation(x).rates - rates).max() for x in (near, far)]
    assert errors[1] < 1e-15 < 4e-15 < errors[0]
    assert clear_rotation(far).precision == 1e-13 / 400


def test_distances_without_a_small_one_tell_whole_rotations():
    rates = np.array([3.1, 1.0, 0.01])
    forms = by_hand(rates, 6, [(6, 0), (3, 13), (16, 1)])  # 6, -10 and 15
    np.testing.assert_allclose(clear_rotation(forms).rates, rates)
    # At even distances half a rotation more or less is the same.
    even = clear_rotation(by_hand(rates, 6, [(6, 0), (10, 0)]))
    assert even.reverse
    np.testing.assert_allclose(even.rates, [np.pi - 3.1, -1.0, -0.01])


def test_without_positions_there_is_no_rotation():
    rotation = clear_rotation({(t, s): 0.25 * np.eye(6) for t, s in PAIRS})
    assert (rotation.scale, rotation.magnitude, rotation.width) == (0.25, 1.0, 0)
    assert rotation.rates.shape == (0,) and not rotation.reverse
    assert clear_rotation({(0, 0): np.eye(2)}).width == 0


def test_an_angle_that_does_not_show_is_zero():
    half = [(0, 3), (1, 4), (2, 5)]
    rotation = clear_rotation(by_hand([1.0, 4e-15, 3e-15], 6, components=half))
    assert rotation.width == 6
    assert rotation.rates.tolist()[1:] == [4e-15, 0.0]  # at a distance of 30
    first = clear_rotation(by_hand([1.0, 0.1], 6, components=half[1:]))
    np.testing.assert_allclose(first.rates, [0.0, 1.0, 0.1])
    # Interleaved ones are not told from components that do not rotate, unless by their factor.
    slow = [1.0, 0.0, 0.0]
    assert clear_rotation(by_hand(slow, 8)).width == 2
    rotation = clear_rotation(by_hand(slow, 8, radius=1.21))
    assert (rotation.width, rotation.layout) == (6, "interleaved")
    assert rotation.rates.tolist()[1:] == [0.0, 0.0]
    np.testing.assert_allclose(rotation.magnitude, 1.1)


def test_pairs_may_rotate_in_different_directions():
    rotation = clear_rotation(by_hand([-1.0, 0.5], 4))
    assert rotation.reverse
    np.testing.assert_allclose(rotation.rates, [1.0, -0.5])


def test_the_usual_scale_replaces_an_equal_one():
    forms = {k: x * (0.5 * (1 + 1e-10)) for k, x in by_hand([1.0, 0.1], 4).items()}
    assert clear_rotation(forms, usual_scale=0.5).scale == 0.5
    assert clear_rotation(forms).scale != 0.5
    for usual in (0.5 * (1 - 2e-9), 0.25):
        rotation = clear_rotation(forms, usual_scale=usual)
        assert rotation.magnitude == 1.0 and rotation.scale != usual
        np.testing.assert_allclose(rotation.scale, 0.5)


def absolute(t, s):
    return np.cos(t) * np.eye(4)


def changed(forms, **at):
    """Forms of which the last has another entry."""
    forms = {k: x.copy() for k, x in forms.items()}
    last = forms[max(forms)]
    last[at["i"], at["j"]] += at["by"]
    return forms


ROTATED = by_hand([1.0, 0.1], 4)
NONE = {
    "no forms": {},
    "zero": {(1, 0): np.zeros((2, 2))},
    "not a number": {(1, 0): np.full((2, 2), np.nan)},
    "of the query's token": {(t, s): absolute(t, s) for t, s in PAIRS},
    "decays": {k: x * 0.9 ** (k[0] - k[1]) for k, x in ROTATED.items()},
    "rotated by the square of the token": {
        (t, s): by_hand([0.1, 0.01], 4, [(t * t, s * s)])[t * t, s * s] for t, s in PAIRS
    },
    "any matrix": {k: np.random.RandomState(0).standard_normal((4, 4)) for k in PAIRS},
    "reflected": {k: x @ np.diag([1.0, -1.0, 1.0, 1.0]) for k, x in ROTATED.items()},
    "pairs from both ends": by_hand([1.0, 0.1], 4, components=[(0, 3), (1, 2)]),
    "the ends": by_hand([1.0], 4, components=[(0, 3)]),
    "second half first": by_hand([1.0, 0.1], 6, components=[(1, 4), (2, 5)], radius=1.21),
    "the last components": by_hand([1.0], 4, components=[(2, 3)], radius=1.21),
    "odd neighbours": by_hand([1.0], 4, components=[(1, 2)]),
    "two layouts": by_hand([1.0, 0.1], 8, components=[(0, 1), (2, 6)]),
    "unlike components": {k: np.diag([1.0, 1.0, 1.0, 2.0]) for k in PAIRS},
    "another entry": changed(ROTATED, i=0, j=2, by=1e-11),
    "unlike radii": changed(ROTATED, i=0, j=0, by=1e-11),
    "constant coupling": {k: np.eye(4) + np.eye(4)[[1, 0, 3, 2]] for k in PAIRS},
    "rotated at distance 0": {k: np.array([[0.8, 0.6], [-0.6, 0.8]]) for k in PAIRS},
    "against its scale": by_hand([1.0], 4, radius=-1.0),
    "scale of zero": {k: np.pad(x, (0, 2)) for k, x in ROTATED.items()},
    "scale below zero": {
        k: np.block([[x, np.zeros((4, 4))], [np.zeros((4, 4)), -np.eye(4)]])
        for k, x in ROTATED.items()
    },
}


@pytest.mark.parametrize("what", NONE)
def test_other_matrices_are_no_rotation(what):
    assert rotation_of(ROTATED) is not None
    assert rotation_of(NONE[what]) is None
