"""Names of rotations: every scaling of ours from its rates, with as few numbers as are needed."""

import dataclasses

import numpy as np
import pytest

import flax_attn
from flax_attn import (
    Frequencies,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Proportional,
    Rotary,
    Yarn,
)
from flax_attn.identify.name_rotary import name_rotary, rotary_text
from flax_attn.identify.rotation import Rotation
from flax_attn.positions.scaling import plain_rates
from parity_tests.core.identify.test_rotation import clear_rotation, forms_of_rotary
from parity_tests.tables import each

HEAD_DIM, PRECISION = 64, 1e-13 / 30
NAMES = {name: getattr(flax_attn, name) for name in dir(flax_attn) if name[0].isupper()}
OTHERS = [HEAD_DIM, 12, 768, 3072, 1e-6]  # numbers of a module that say nothing of positions


def rates_of(rotary, head_dim):
    width = head_dim if rotary.width is None else rotary.width
    if rotary.scaling is None:
        return plain_rates(rotary.base, width)
    return np.asarray(rotary.scaling.rates(rotary.base, width))


def measured(rotary, head_dim=HEAD_DIM):
    """The rotation of a rotary as it would be measured."""
    rates = rates_of(rotary, head_dim)
    rates = rates + PRECISION / 10 * np.random.RandomState(0).standard_normal(len(rates))
    rates = np.where(np.abs(rates) < PRECISION, 0.0, rates)
    magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
    width, direction = 2 * len(rates), (rotary.layout, rates, rotary.reverse)
    return Rotation(0.125, magnitude, width, *direction, PRECISION)


def texts(rotary, numbers=(), head_dim=HEAD_DIM):
    """The names of a rotary but for the general one, without their class."""
    *named, general = name_rotary(measured(rotary, head_dim), head_dim, numbers)
    assert isinstance(general.scaling, Frequencies)
    return [rotary_text(x).removeprefix("Rotary(").removesuffix(")") for x in named]


def drawn(rng, kind):
    """A rotary with this kind of scaling, and the numbers that its module would store."""
    base = float(rng.choice([1e4, 5e5, 1e6, 8e6]))
    factor, length = float(rng.choice([2, 4, 8, 32, 40])), int(rng.choice([2048, 8192, 32768]))
    width = [None, 32][rng.randint(2)]
    scaling = {
        "plain": None,
        "linear": LinearScaling(factor),
        "llama3": Llama3Scaling(factor, length, *[(1.0, 4.0), (2.0, 3.0)][rng.randint(2)]),
        "yarn": Yarn(factor, length, truncate=bool(rng.randint(2))),
        "yarn by numbers": Yarn(factor, length, 16.0, 2.0, attention_factor=1.25),
        "proportional": Proportional(float(rng.choice([0.25, 0.5])), float(rng.choice([1, 8]))),
        "frequencies": Frequencies(np.exp(-rng.uniform(0, 5, (width or HEAD_DIM) // 2))),
    }[kind]
    numbers = {*OTHERS, base, factor, length}
    if scaling is not None:
        numbers |= {x for x in vars(scaling).values() if isinstance(x, float)}
    direction = {
        "layout": str(rng.choice(["half", "interleaved"])),
        "reverse": bool(rng.randint(2)),
    }
    if kind == "frequencies":
        return Rotary(scaling=scaling, **direction), numbers
    return Rotary(base, width=width, scaling=scaling, **direction), numbers


KINDS = ["plain", "linear", "llama3", "yarn", "yarn by numbers", "proportional", "frequencies"]


@pytest.mark.nightly
@each("kind, seed", [(kind, seed) for kind in KINDS for seed in range(6)])
def test_a_rotary_is_named_from_its_forms(kind, seed):
    rng = np.random.RandomState(seed)
    rotary, numbers = drawn(rng, kind)
    forms = forms_of_rotary(rotary, HEAD_DIM, HEAD_DIM**-0.5, noise=rng)
    rotation = clear_rotation(forms, HEAD_DIM**-0.5)
    if rotation.width == HEAD_DIM and rotary.scaling is not None:
        # The magnitude is in the scale, where the caller looks for it.
        rotation = dataclasses.replace(rotation, magnitude=rotary.scaling.magnitude)
    named = name_rotary(rotation, HEAD_DIM, sorted(numbers))
    *named, general = named
    assert np.array_equal(rates_of(general, HEAD_DIM), rotation.rates)
    if kind == "frequencies":
        assert not named
        return
    want = rates_of(rotary, HEAD_DIM)
    for name in named:
        rates = rates_of(name, HEAD_DIM)
        size = max(len(rates), len(want))  # zeros at the end are components that do not rotate
        rates, padded = (np.pad(x, (0, size - len(x))) for x in (rates, want))
        np.testing.assert_allclose(rates, padded)
        assert (name.layout, name.reverse) == (rotary.layout, rotary.reverse)
    if kind == "proportional" and rotary.layout == "interleaved":
        # What a share leaves out does not show, so that a width with the base of its own rates
        # comes first if that has few digits; and the share is one of the head.
        assert any(isinstance(x.scaling, Proportional) and x.width is None for x in named)
        return
    assert type(named[0].scaling) is type(rotary.scaling)
    # Of a Yarn the ends of the ramp show, which are rounded: other lengths and betas do as well.
    assert rotary_text(named[0]) == rotary_text(rotary) or kind.startswith("yarn")


def test_numbers_are_solved_from_the_rates_alone():
    for rotary in (
        Rotary(),
        Rotary(5e5),
        Rotary(1234.5),
        Rotary(1e6, scaling=LinearScaling(2.5)),
        Rotary(5e5, scaling=Llama3Scaling(8.0, 8192)),
        Rotary(3e5, scaling=Llama3Scaling(6.0, 5000)),  # a length that is no power of two
        Rotary(1e6, scaling=Yarn(4.0, 32768)),
        Rotary(1e6, scaling=Yarn(4.0, 32768, truncate=False)),
        Rotary(1e6, scaling=Yarn(4.0, 32768, attention_factor=1.5)),
        Rotary(1e6, scaling=Proportional(0.25, 8.0)),
    ):
        assert [f"Rotary({x})" for x in texts(rotary)][:1] == [rotary_text(rotary)]
    # Of a base of many digits, 16 are solved.
    (base,) = texts(Rotary(12345.678901234))
    np.testing.assert_allclose(float(base.removeprefix("base=")), 12345.678901234)


def test_numbers_of_the_module_are_taken_first():
    odd = Rotary(1234567.25, scaling=LinearScaling(np.pi))
    assert texts(odd, [np.pi, 1234567.25]) == [
        "base=1234567.25, scaling=LinearScaling(3.141592653589793)"
    ]
    betas = Rotary(scaling=Yarn(8.0, 5000, 20.0, 3.0, truncate=False))
    assert texts(betas) == []
    want = "scaling=Yarn(8.0, 5000, beta_fast=20.0, beta_slow=3.0, truncate=False)"
    assert texts(betas, [3, 5000, 20]) == [want]
    low = Rotary(5e5, scaling=Llama3Scaling(8.0, 8192, 2.0, 6.0))
    assert texts(low) == []
    assert texts(low, [2, 6, 8192])[0].endswith(
        "Llama3Scaling(8.0, 8192, low_freq_factor=2.0, high_freq_factor=6.0)"
    )
    step = Rotary(5e5, scaling=Llama3Scaling(16.0, 8192, 1.0, 1.0))  # as in Llama 4 Scout
    assert texts(step, [True, 1, 8192, np.inf, -1])[0].endswith(
        "Llama3Scaling(16.0, 8192, high_freq_factor=1.0)"
    )
    # The ends of the ramp are rounded, so that a base as length would do as well.
    rounded = Rotary(width=32, scaling=Yarn(32.0, 8192))
    assert texts(rounded, [10_000, 8192]) == ["width=32, scaling=Yarn(32.0, 8192)"]
    assert texts(rounded, [8192, 9000]) == ["width=32, scaling=Yarn(32.0, 8192)"]
    assert texts(rounded, [9000, 8192]) == ["width=32, scaling=Yarn(32.0, 9000)"]


def test_few_pairs_are_named_by_known_numbers():
    """Every base does for one pair, and one base for two; a scaling of known numbers says more."""
    assert texts(Rotary(5e5, width=2)) == ["width=2"]
    assert texts(Rotary(5e5, width=2, scaling=LinearScaling(4.0))) == [
        "width=2, scaling=LinearScaling(4.0)"
    ]
    small = Rotary(scaling=Llama3Scaling(7.0, 2048))
    first, second = texts(small, head_dim=4)
    assert first == "scaling=Llama3Scaling(7.0, 2048)" and second.startswith("base=16087.08")
    almost = Rotary(scaling=Llama3Scaling(7.0 * (1 + 5e-9), 256))
    assert [x[:14] for x in texts(almost, head_dim=4)] == ["base=490000.00"]
    slow = Rotary(3e5, scaling=Llama3Scaling(8.0, 16))  # the base shows in the last pairs only
    assert texts(slow, head_dim=16) == ["base=3e5, scaling=Llama3Scaling(8.0, 16)"]
    # With any factor much would fit three rates.
    rates = np.array([1.0, 0.31830988618379067, 0.0432139182637722])
    assert texts(Rotary(scaling=Frequencies(rates)), OTHERS, head_dim=6) == []


def test_interleaved_shares_and_widths_are_told_by_their_bases():
    share = Rotary(1e6, "interleaved", scaling=Proportional(0.25))
    rotation = measured(share)
    rotation = dataclasses.replace(rotation, width=16, rates=rotation.rates[:8])
    named = [rotary_text(x) for x in name_rotary(rotation, HEAD_DIM, [])][:2]
    assert named[0] == rotary_text(share)
    assert named[1].startswith("Rotary(base=31.62277660168")
    odd = name_rotary(rotation, HEAD_DIM + 1, [])[0]
    assert (odd.width, odd.scaling) == (HEAD_DIM, Proportional(0.25))
    plain = texts(Rotary(1e4, "interleaved", 16))
    assert plain[0] == "layout='interleaved', width=16"
    # In halves the pairs tell the width.
    assert texts(Rotary(1e4, width=16, scaling=Proportional(0.5))) == [
        "width=16, scaling=Proportional(0.5)"
    ]


def test_a_share_of_the_module_is_taken():
    share = Rotary(scaling=Proportional(0.3))  # 9 of 32 pairs
    assert texts(share) == ["scaling=Proportional(0.28125)"]
    assert texts(share, [0.1, 0.3]) == ["scaling=Proportional(0.3)"]
    # Of 15 of 22 pairs, int(15 / 22 * 44 // 2) would be 14.
    (text,) = texts(Rotary(scaling=Proportional(0.7)), head_dim=44)
    rates = rates_of(eval(f"Rotary({text})", NAMES), 44)
    assert [x > 0 for x in rates.tolist()] == [True] * 15 + [False] * 7


def test_rates_that_do_not_show_are_no_hindrance():
    assert texts(Rotary(1e30))[0] == "base=1e30"  # the last rates are measured as zero
    assert (measured(Rotary(1e30)).rates[-16:] == 0).all()


def test_what_has_no_name_is_frequencies():
    rates = plain_rates(1e4, HEAD_DIM)
    rates[20] *= 1 + 1e-8
    short, long = (tuple(np.linspace(1, last, 32)) for last in (2, 5))
    for scaling in (
        Frequencies(rates),
        Frequencies(plain_rates(1e4, HEAD_DIM), attention_factor=1 + 1e-8),
        Frequencies(np.where(np.arange(32) == 1, -1, 1) * rates),
        Frequencies(np.where(np.arange(32) == 31, -1, 1) * rates),
        Frequencies(np.where(np.arange(32) == 3, 0, 1) * rates),
        Frequencies(np.where(np.arange(32) > 0, 1e-10, 1) * rates),
        Frequencies(np.where(np.arange(32) == 0, 0, 1) * rates),
        LongRope(short, long, 4096, attention_factor=1.25),
    ):
        rotary = Rotary(layout="interleaved", scaling=scaling, reverse=True)
        (general,) = name_rotary(measured(rotary), HEAD_DIM, [10_000, 4096, 4])
        assert isinstance(general.scaling, Frequencies)
        assert (general.layout, general.reverse) == ("interleaved", True)
        assert general.scaling.magnitude == scaling.magnitude
        difference = np.abs(rates_of(general, HEAD_DIM) - rates_of(rotary, HEAD_DIM))
        assert difference.max() < PRECISION
    none = Rotation(1.0, 1.0, 0, "half", np.zeros(0), False)
    assert name_rotary(none, HEAD_DIM, [10_000]) == []


def test_texts_have_only_what_differs_from_defaults():
    for text in (
        "Rotary()",
        "Rotary(base=5e5, layout='interleaved', width=8, scaling=LinearScaling(4.0))",
        "Rotary(base=1.5e5, reverse=True)",
        "Rotary(base=1234567.25)",
        "Rotary(base=500.0)",
        "Rotary(scaling=Frequencies([1.0, 0.25], attention_factor=1.25))",
        "Rotary(scaling=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.7, truncate=False))",
        "Rotary(scaling=LongRope((1.0,), (4.0,), 4096, factor=2.0))",
    ):
        rotary = eval(text, NAMES)
        assert rotary_text(rotary) == text
    third = Rotary(scaling=Frequencies(np.array([1 / 3, 1e-17 / 3])))
    assert eval(rotary_text(third), NAMES) == third
