"""Scalings of rotary rates, against each formula pair by pair and against transformers' own."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    DynamicScaling,
    Frequencies,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Proportional,
    Rotary,
    Yarn,
    rotary_angles,
)
from flax_attn.parity import judge
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

WIDTH, BASE = 16, 1e4
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(8)), tuple(2.0 + i for i in range(8))


def of_pairs(rate):
    """`rate(plain rate, index of the pair)` of all pairs."""
    return np.asarray([rate(BASE ** (-2 * i / WIDTH), i) for i in range(WIDTH // 2)])


def by_wavelength(factor, original, low, high):
    def rate(plain, _):
        length = 2 * math.pi / plain
        if length > original / low:
            return plain / factor
        if length < original / high:
            return plain
        smooth = (original / length - low) / (high - low)
        return (1 - smooth) * plain / factor + smooth * plain

    return of_pairs(rate)


def by_ramp(factor, original, fast=32, slow=1, whole=True):
    def index(turns):
        return WIDTH * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = index(fast), index(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, WIDTH - 1)
    high = high + 0.001 if low == high else high

    def rate(plain, i):
        ramp = min(max((i - low) / (high - low), 0), 1)
        return plain / factor * ramp + plain * (1 - ramp)

    return of_pairs(rate)


def by_base(factor, original, length):
    ratio = factor * max(length, original) / original - (factor - 1)
    return (BASE * ratio ** (WIDTH / (WIDTH - 2))) ** (-np.arange(0, WIDTH, 2) / WIDTH)


def m(factor, scale=1.0):
    return 0.1 * scale * math.log(factor) + 1


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"short_factor": [*SHORT], "long_factor": [*LONG]}
LONGROPE |= {"original_max_position_embeddings": 32, "factor": 4.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.3}
# The scaling, its rates by the formula, its magnitude; transformers' type and fields.
SCALINGS = {
    "linear": (
        LinearScaling(3.0),
        of_pairs(lambda plain, _: plain / 3),
        1.0,
        ("linear", {"factor": 3.0}),
    ),
    "dynamic, short": (
        DynamicScaling(2.0, 64, length=9),
        of_pairs(lambda plain, _: plain),
        1.0,
        ("dynamic", {"factor": 2.0, "seq_len": 9}),
    ),
    "dynamic, long": (
        DynamicScaling(2.0, 64, length=200),
        by_base(2.0, 64, 200),
        1.0,
        ("dynamic", {"factor": 2.0, "seq_len": 200}),
    ),
    "llama3": (
        Llama3Scaling(8.0, 48),
        by_wavelength(8.0, 48, 1.0, 4.0),
        1.0,
        ("llama3", LLAMA3 | {"original_max_position_embeddings": 48}),
    ),
    "llama3, other turns": (
        Llama3Scaling(3.0, 700, 0.5, 90.0),
        by_wavelength(3.0, 700, 0.5, 90.0),
        1.0,
        (
            "llama3",
            {"factor": 3.0, "low_freq_factor": 0.5, "high_freq_factor": 90.0}
            | {"original_max_position_embeddings": 700},
        ),
    ),
    "yarn": (Yarn(4.0, 64), by_ramp(4.0, 64), m(4.0), ("yarn", YARN)),
    "yarn, long": (
        Yarn(40.0, 4096),
        by_ramp(40.0, 4096),
        m(40.0),
        ("yarn", {"factor": 40.0, "original_max_position_embeddings": 4096}),
    ),
    "yarn, not truncated": (
        Yarn(4.0, 64, truncate=False),
        by_ramp(4.0, 64, whole=False),
        m(4.0),
        ("yarn", YARN | {"truncate": False}),
    ),
    "yarn, other turns": (
        Yarn(4.0, 64, beta_fast=3.0, beta_slow=0.2),
        by_ramp(4.0, 64, 3.0, 0.2),
        m(4.0),
        ("yarn", YARN | {"beta_fast": 3.0, "beta_slow": 0.2}),
    ),
    "yarn, mscale": (
        Yarn(4.0, 64, mscale=0.7, mscale_all_dim=1.3),
        by_ramp(4.0, 64),
        m(4.0, 0.7) / m(4.0, 1.3),
        ("yarn", YARN | MSCALES),
    ),
    "yarn, attention factor": (
        Yarn(4.0, 64, attention_factor=0.6),
        by_ramp(4.0, 64),
        0.6,
        ("yarn", YARN | {"attention_factor": 0.6}),
    ),
    "yarn, a tiny original": (
        Yarn(0.5, 2),
        by_ramp(0.5, 2),
        1.0,
        ("yarn", {"factor": 0.5, "original_max_position_embeddings": 2}),
    ),
    "yarn, a ramp beyond the last pair": (
        Yarn(4.0, 2**20),
        by_ramp(4.0, 2**20),
        m(4.0),
        ("yarn", YARN | {"original_max_position_embeddings": 2**20}),
    ),
    "yarn, a ramp beyond the width": (
        Yarn(4.0, 64, beta_slow=1e-8),
        by_ramp(4.0, 64, slow=1e-8),
        m(4.0),
        ("yarn", YARN | {"beta_slow": 1e-8}),
    ),
    "longrope, short": (
        LongRope(SHORT, LONG, 32, factor=4.0, length=32),
        of_pairs(lambda plain, i: plain / SHORT[i]),
        math.sqrt(1 + math.log(4) / math.log(32)),
        ("longrope", LONGROPE | {"seq_len": 32}),
    ),
    "longrope, long": (
        LongRope(SHORT, LONG, 32, attention_factor=1.2, length=33),
        of_pairs(lambda plain, i: plain / LONG[i]),
        1.2,
        ("longrope", LONGROPE | {"attention_factor": 1.2, "seq_len": 33}),
    ),
    "longrope, a factor below one": (
        LongRope(SHORT, LONG, 32, factor=0.5),
        of_pairs(lambda plain, i: plain / SHORT[i]),
        1.0,
        ("longrope", LONGROPE | {"factor": 0.5}),
    ),
    "proportional": (
        Proportional(0.45, 2.0),
        of_pairs(lambda plain, i: plain / 2 if i < 3 else 0.0),
        1.0,
        ("proportional", {"factor": 2.0, "partial_rotary_factor": 0.45}),
    ),
    "frequencies": (Frequencies(LONG, attention_factor=0.7), np.asarray(LONG), 0.7, None),
}
of_all_cases = pytest.mark.parametrize("name", SCALINGS)


@of_all_cases
def test_rates_and_the_factor_are_the_formulas(name):
    scaling, rates, magnitude, _ = SCALINGS[name]
    assert judge.same_function(scaling.rates(BASE, WIDTH), rates).ok
    assert judge.same_function(np.asarray(scaling.magnitude), np.asarray(magnitude)).ok


def config_of(kind, fields, head_dim=WIDTH, length=64):
    transformers = pytest.importorskip("transformers", reason="the witness is transformers'")
    transformers.logging.set_verbosity_error()
    return transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters={"rope_type": kind, "rope_theta": BASE, **fields},
    )


@pytest.mark.parametrize("name", [name for name, case in SCALINGS.items() if case[3]])
def test_rates_and_the_factor_are_transformers(name):
    pytest.importorskip("torch", reason="the witness is torch's")
    scaling, _, _, (kind, fields) = SCALINGS[name]
    fields = dict(fields)
    length = fields.pop("seq_len", None)
    config = config_of(kind, fields)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with lifted():
        rates, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    assert judge.same_function(scaling.rates(BASE, WIDTH), rates.numpy()).ok
    assert judge.same_function(np.asarray(scaling.magnitude), np.asarray(float(magnitude))).ok


def turned_by_transformers(config, x, positions, weights):
    """x, turned as Llama turns it, and the gradient of the weighted sum."""
    import torch
    from transformers.models.llama import modeling_llama as llama

    x = torch.tensor(x, requires_grad=True)
    with lifted():
        cos, sin = llama.LlamaRotaryEmbedding(config)(x, torch.tensor(positions))
        width = cos.shape[-1]
        out, _ = llama.apply_rotary_pos_emb(x[..., :width], x[..., :width], cos, sin, 2)
        out = torch.cat([out, x[..., width:]], -1)
    (gradient,) = torch.autograd.grad(out, x, torch.tensor(weights))
    return out.detach().numpy(), gradient.numpy()


TURNED = {
    "linear": ("linear", {"factor": 3.0}, LinearScaling(3.0)),
    "llama3": (
        "llama3",
        LLAMA3 | {"original_max_position_embeddings": 48},
        Llama3Scaling(8.0, 48),
    ),
    "yarn": ("yarn", YARN | MSCALES, Yarn(4.0, 64, mscale=0.7, mscale_all_dim=1.3)),
    "dynamic": ("dynamic", {"factor": 2.0}, DynamicScaling(2.0, 64)),
    "longrope": ("longrope", LONGROPE, LongRope(SHORT, LONG, 32, factor=4.0)),
    "proportional": ("proportional", {"partial_rotary_factor": 0.3}, Proportional(0.3)),
}


def both_ways(rotary, x, weights, positions):
    """x, turned, and the gradient of the weighted sum."""
    out, back = jax.vjp(lambda x: rotary(x, positions), x)
    return out, back(weights)[0]


KINDS = [(x, part) for x in TURNED for part in sorted({False, x != "proportional"})]
ROWS = [(*kind, far) for kind in KINDS for far in (0, 27, 90)]
AT_COMMIT = [(*kind, 90) for kind in KINDS]  # beyond what dynamic and longrope start from
AT_COMMIT += [("dynamic", False, 0), ("longrope", False, 0)]


@pytest.mark.nightly(but=["dynamic-False-0"])
@pytest.mark.parametrize(("name", "partial", "far"), with_nightly(ROWS, commit=AT_COMMIT))
def test_heads_and_gradients_are_llamas(name, partial, far):
    pytest.importorskip("torch", reason="the witness is torch's")
    kind, fields, scaling = TURNED[name]
    head_dim = 2 * WIDTH if partial else WIDTH
    fields = fields | ({"partial_rotary_factor": 0.5} if partial else {})
    random = np.random.RandomState(0)
    x, weights = (random.standard_normal((2, 7, 3, head_dim)) for _ in range(2))
    positions = np.stack([np.arange(7) + far, np.arange(7)])
    rotary = Rotary(BASE, width=WIDTH if partial else None, scaling=scaling)
    config = config_of(kind, fields, head_dim)
    rows = zip(x[:, None], positions[:, None], weights[:, None], strict=True)
    want = zip(*(turned_by_transformers(config, *row) for row in rows), strict=True)
    want = list(map(np.concatenate, want))  # a row alone: it takes the longest of a batch
    known = jax.jit(lambda *given: both_ways(rotary, *given, positions))(x, weights)
    traced = jax.jit(both_ways, static_argnums=0)(rotary, x, weights, positions)
    for out, gradient in (known, traced):
        assert judge.same_function(out, want[0]).ok
        assert judge.same_function(gradient, want[1]).ok


def test_a_length_may_be_known_traced_or_fixed():
    x = np.random.RandomState(1).standard_normal((2, 9, 3, WIDTH))

    def turned(rotary, x, *positions):
        return np.asarray(jax.jit(lambda x: rotary(x, *positions))(x))

    free = {"dynamic": (2.0, 6), "longrope": (SHORT, LONG, 6, 4.0)}
    kinds = {"dynamic": DynamicScaling, "longrope": LongRope}
    for name, given in free.items():
        rotary = Rotary(scaling=kinds[name](*given))
        traced = np.asarray(jax.jit(rotary)(x, np.arange(9)))
        fixed = Rotary(scaling=kinds[name](*given, length=9))
        calls = (rotary, x), (rotary, x, np.arange(9)), (fixed, x), (fixed, x[:, :4])
        for other in (turned(*call) for call in calls):
            assert judge.same_function(other[:, :4], traced[:, :4]).ok
        short = Rotary(scaling=kinds[name](*given, length=6))
        for other in (turned(rotary, x[:, :6]), jax.jit(rotary)(x[:, :6], np.arange(6))):
            assert judge.same_function(other, turned(short, x[:, :6])).ok
        assert not judge.same_function(turned(short, x), traced).ok
        assert turned(rotary, x[:, :0], np.zeros((2, 0), int)).shape == (2, 0, 3, WIDTH)


@pytest.mark.nightly
def test_rates_are_computed_in_float64_and_then_cast():
    angles = rotary_angles(jnp.asarray([1]), 128, 5e5, jnp.float32)
    exact = 5e5 ** (-np.arange(0, 128, 2) / 128)
    assert judge.exact(angles[0], exact.astype(np.float32)).ok
    traced = jax.jit(lambda base: rotary_angles(jnp.asarray([1]), 128, base, jnp.float64))(5e5)
    assert judge.same_function(traced[0], exact).ok


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", TURNED)
def test_narrow_inputs_are_rotated_in_float32(name, dtype):
    x = jnp.asarray(np.random.RandomState(5).standard_normal((5, 3, WIDTH)), dtype)
    rotary, far = Rotary(scaling=TURNED[name][2]), jnp.arange(5) + 1022
    got = rotary(x, far)
    assert got.dtype == jnp.dtype(dtype)
    assert judge.exact(got, rotary(x.astype(jnp.float32), far).astype(dtype)).ok


@pytest.mark.nightly
@of_all_cases
def test_scalings_are_equal_by_value_and_known_to_a_program(name):
    scaling = SCALINGS[name][0]
    rotary = Rotary(scaling=scaling)
    leaves = jax.tree.leaves(rotary)
    assert len(leaves) == (name == "frequencies")
    again = jax.tree.unflatten(jax.tree.structure(rotary), leaves)
    assert again == rotary != Rotary() and hash(again) == hash(rotary)
    x = jnp.asarray(np.random.RandomState(6).standard_normal((5, 3, WIDTH)))
    inside = jax.jit(lambda rotary, x: rotary(x))(rotary, x)
    assert judge.same_function(inside, rotary(x)).ok


def test_given_frequencies_say_the_width_and_serve_an_odd_one():
    pytest.importorskip("torch", reason="the witness is torch's")
    x, weights = (np.random.RandomState(7).standard_normal((2, 5, 3, 10)) for _ in range(2))
    positions = np.broadcast_to(np.arange(5) + 3, (2, 5))
    config = config_of("linear", {"factor": 1.0, "partial_rotary_factor": 0.7}, 10)  # width 7
    want, _ = turned_by_transformers(config, x, positions, weights)
    rotary = Rotary(scaling=Frequencies(BASE ** (-np.arange(0, 7, 2) / 7)))
    assert judge.same_function(rotary(jnp.asarray(x), positions), want).ok


def test_given_frequencies_have_gradients():
    x = np.random.RandomState(8).standard_normal((4, 2, 6))

    def total(values):
        return (Rotary(scaling=Frequencies(values))(jnp.asarray(x)) ** 3).sum()

    values = np.asarray([1.0, 0.3, 0.1])
    at = np.arange(4)[:, None, None]
    z = (x[..., :3] + 1j * np.asarray(x[..., 3:])) * np.exp(1j * at * values)
    slope = 3 * (z.real**2 * -at * z.imag + z.imag**2 * at * z.real)
    assert judge.same_function(jax.jit(jax.grad(total))(values), slope.sum((0, 1))).ok


def test_an_attention_factor_scales_only_rotated_pairs():
    x = jnp.asarray(np.random.RandomState(9).standard_normal((4, 2, 6)))
    plain, factor = Rotary(width=4), Rotary(width=4, scaling=Yarn(1.0, 64, attention_factor=0.5))
    want = jnp.concatenate([plain(x)[..., :4] / 2, x[..., 4:]], -1)
    assert judge.same_function(factor(x), want).ok


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_a_reversed_sign_is_a_negative_position(layout):
    x = jnp.asarray(np.random.RandomState(10).standard_normal((4, 2, 6)))
    back = Rotary(layout=layout, reverse=True)
    assert judge.exact(back(x), Rotary(layout=layout)(x, -jnp.arange(4))).ok
    assert judge.same_function(back(Rotary(layout=layout)(x)), x).ok


def test_a_reversed_sign_is_nanochats():
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    nanochat = pytest.importorskip(
        "transformers.models.nanochat.modeling_nanochat", reason="the witness is transformers'"
    )
    x = np.random.RandomState(11).standard_normal((1, 4, 2, 6))
    angles = rotary_angles(jnp.arange(4), 6, BASE, jnp.float64)
    cos, sin = (torch.tensor(np.tile(f(angles), 2)[None]) for f in (np.cos, np.sin))
    want, _ = nanochat.apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, 2)
    assert judge.same_function(Rotary(BASE, reverse=True)(jnp.asarray(x)), want.numpy()).ok


ONE = jnp.ones((3, 1, 8))
FINITE, DIVISOR = "must be a finite number; got", "must be a finite number, not zero; got"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LinearScaling(0.0), f"factor of LinearScaling {DIVISOR} 0.0"),
        (lambda: LinearScaling(math.nan), f"factor of LinearScaling {DIVISOR} nan"),
        (lambda: DynamicScaling(2.0, 0), "original_length of DynamicScaling must be a whole"),
        (lambda: DynamicScaling("2", 8), f"factor of DynamicScaling {FINITE} '2'"),
        (lambda: DynamicScaling(2.0, 8, 2.5), "length of DynamicScaling .* 1; got 2.5"),
        (lambda: Llama3Scaling(8.0, 8, 4.0, 0), f"high_freq_factor .* {DIVISOR} 0"),
        (lambda: Llama3Scaling(8.0, None), "original_length of Llama3Scaling .* got None"),
        (lambda: Yarn(4.0, 64, 0.0, 1.0), f"beta_fast of Yarn {DIVISOR} 0.0"),
        (lambda: Yarn(4.0, 64, mscale=0.7), "mscale and mscale_all_dim together"),
        (lambda: Yarn(4.0, 64, mscale_all_dim=0.7), "mscale and mscale_all_dim together"),
        (lambda: Yarn(4.0, 64, attention_factor=1.0, **MSCALES), "attention_factor=1.0"),
        (lambda: Yarn(math.e**10, 64, mscale=1.0, mscale_all_dim=-1.0), "no finite factor of cos"),
        (lambda: Rotary(1.0, scaling=Yarn(4.0, 64))(ONE), "no ramp for a base of 1.0"),
        (lambda: LongRope(SHORT, LONG, 8), "either factor or attention_factor; got factor=None"),
        (lambda: LongRope(SHORT, LONG, 8, 2.0, 1.0), "either factor or attention_factor"),
        (lambda: LongRope((1.0, 0.0), (1.0, 1.0), 8, 2.0), "short_factors must hold finite numb"),
        (lambda: LongRope(SHORT, LONG, 1, 2.0), "no finite factor of cos and sin for LongRope"),
        (
            lambda: Rotary(scaling=LongRope((1.0,) * 4, LONG, 8, 2.0))(ONE),
            "long_factors needs one number for each of the 4 pairs of 8 components; got 8",
        ),
        (lambda: Proportional(1.5), "share must lie within 0 and 1; got 1.5"),
        (lambda: Frequencies([[1.0]]), r"shape \(P,\); got \(1, 1\)"),
        (lambda: Frequencies([1.0], math.inf), f"attention_factor of Frequencies {FINITE} inf"),
        (lambda: Rotary(500.0, scaling=Frequencies([1.0])), "leave base and width out.*base=500"),
        (lambda: Rotary(width=2, scaling=Frequencies([1.0])), "leave base and width .*width=2"),
        (lambda: Rotary(scaling=Frequencies([1.0] * 5))(ONE), "got 10 of width 8"),
    ],
)
def test_wrong_configurations_are_named_in_the_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Frequencies([1, 2]), "floating rates; got int64"),
        (lambda: Rotary(scaling=4.0), "scaling must be a scaling such as Yarn; got float"),
        (lambda: Rotary(axes=(2, 1, 1)), "axes must be Sections, Axial or None; got tuple"),
        (lambda: Rotary(jnp.ones(()), scaling=LinearScaling(2.0)), "base must be a number with a"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(make, words):
    with pytest.raises(TypeError, match=words):
        make()
