"""Positions with several axes, against complex numbers and the classes of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import Axial, GroupedQueryAttention, LinearScaling, Rotary, Sections, Yarn
from flax_attn.parity import judge
from flax_attn.parity.sides.torch.float64 import lifted

BASE, RANDOM = 1e4, np.random.RandomState(0)
TIMES, ROWS = RANDOM.randint(0, 50, (3, 2, 5)), RANDOM.randint(0, 50, (2, 5))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def turned(x, positions, rates, axis, layout):
    """Pair i, a complex number, is turned by `positions[axis[i]] * rates[i]`."""
    out, pairs = x.copy(), len(rates)
    for i, (rate, a) in enumerate(zip(rates, axis, strict=True)):
        one, two = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        z = (x[..., one] + 1j * x[..., two]) * np.exp(1j * rate * positions[a])[..., None]
        out[..., one], out[..., two] = z.real, z.imag
    return out


def rates(width):
    return BASE ** (-np.arange(0, width, 2) / width)


# The axes, and of 8 pairs the axis and the rate by hand.
AXES = {
    "chunks": (Sections((4, 1, 3)), [0, 0, 0, 0, 1, 2, 2, 2], rates(16)),
    "an empty chunk": (Sections((5, 0, 3)), [0, 0, 0, 0, 0, 2, 2, 2], rates(16)),
    "in turns": (Sections((4, 2, 2), interleaved=True), [0, 1, 2, 0, 1, 2, 0, 0], rates(16)),
    "all turns": (Sections((3, 3, 2), interleaved=True), [0, 1, 2, 0, 1, 2, 0, 1], rates(16)),
    "rows and columns": (Axial(), [0] * 4 + [1] * 4, np.tile(rates(8), 2)),
    "one list": (Axial(shared=True), [0] * 4 + [1] * 4, rates(16)[[0, 2, 4, 6, 1, 3, 5, 7]]),
    "four axes": (Axial(4), [0, 0, 1, 1, 2, 2, 3, 3], np.tile(rates(4), 4)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("name", AXES)
def test_pairs_are_rotated_by_the_positions_of_their_axis(name, layout):
    axes, axis, speed = AXES[name]
    x = RANDOM.standard_normal((2, 5, 3, 18))
    positions = RANDOM.randint(0, 50, (max(axis) + 1, 2, 5))
    rotary = Rotary(BASE, layout, 16, axes=axes)
    want = turned(x, positions, speed, axis, layout)
    assert judge.same_function(rotary(jnp.asarray(x), jnp.asarray(positions)), want).ok
    back = Rotary(BASE, layout, 16, axes=axes, reverse=True)
    assert judge.same_function(back(jnp.asarray(want), positions), x).ok
    scaled = Rotary(BASE, layout, 16, LinearScaling(3.0), axes)
    assert judge.same_function(scaled(jnp.asarray(x), 3 * positions), want).ok


@pytest.mark.nightly
def test_without_positions_sections_turn_as_text():
    x = jnp.asarray(RANDOM.standard_normal((2, 5, 3, 16)))
    for interleaved in (False, True):
        rotary = Rotary(axes=Sections((4, 2, 2), interleaved), scaling=Yarn(4.0, 64))
        assert judge.exact(rotary(x), Rotary(scaling=Yarn(4.0, 64))(x)).ok


@pytest.mark.nightly
def test_positions_of_one_row_serve_every_entry():
    x = jnp.asarray(RANDOM.standard_normal((3, 2, 5, 1, 16)))
    rotary = jax.jit(Rotary(axes=Sections((4, 2, 2))))
    row = TIMES[:, 0]
    want = rotary(x, np.broadcast_to(row[:, None, None], (3, 3, 2, 5)))
    for shape in ((3, 5), (3, 1, 5), (3, 2, 5), (3, 1, 2, 5), (3, 3, 1, 5)):
        given = np.broadcast_to(row.reshape(3, *(1,) * (len(shape) - 2), 5), shape)
        assert judge.exact(rotary(x, given), want).ok


@pytest.mark.nightly
def test_a_layer_passes_positions_of_all_axes_to_its_rotary():
    layer = GroupedQueryAttention(
        7, 4, 2, 8, rotary=Rotary(axes=Sections((2, 1, 1))), rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(RANDOM.standard_normal((2, 5, 7)), jnp.float32)
    call = nnx.jit(lambda layer, x, positions: layer(x, positions=positions))
    y = np.asarray(call(layer, x, TIMES))
    plain = Rotary()
    layer.rotary = lambda x, positions: plain(x)
    assert not np.array_equal(y, call(layer, x, None))
    layer.rotary = Rotary(axes=Sections((2, 1, 1)))
    for i in range(2):
        alone = np.asarray(call(layer, np.asarray(x)[i], TIMES[:, i]))
        assert judge.allclose(y[i], alone)


def config_of(name, **fields):
    transformers = pytest.importorskip("transformers", reason="the witness is transformers'")
    transformers.logging.set_verbosity_error()
    return getattr(transformers, name)(**fields)


def by_transformers(module, embedding, config, x, positions, apply="apply_rotary_pos_emb"):
    """x `B T N H`, turned by a class's cos and sin; and the gradient of the sum of cubes."""
    torch = pytest.importorskip("torch", reason="the witness is torch's")
    found = pytest.importorskip(f"transformers.models.{module}", reason="the witness")
    x = torch.tensor(x, requires_grad=True)
    more = (2,) if apply == "apply_rotary_pos_emb" else ()
    with lifted():
        cos, sin = getattr(found, embedding)(config)(x, torch.tensor(positions))
        out, _ = getattr(found, apply)(x, x, cos, sin, *more)
    (gradient,) = torch.autograd.grad((out**3).sum(), x)
    return out.detach().numpy(), gradient.numpy()


TEXT = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2)
PLAIN = {"rope_type": "default", "rope_theta": BASE, "mrope_section": [4, 1, 3]}
TURNS = PLAIN | {"mrope_section": [4, 2, 2]}
INT32_MAX = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TEXTS = {
    "Qwen2-VL": ("qwen2_vl.modeling_qwen2_vl", "Qwen2VL", PLAIN, Sections((4, 1, 3)), None),
    "Qwen2-VL, YaRN": (
        *("qwen2_vl.modeling_qwen2_vl", "Qwen2VL", PLAIN | INT32_MAX),
        *(Sections((4, 1, 3)), Yarn(4.0, 64)),
    ),
    "Qwen3-VL": (
        *("qwen3_vl.modeling_qwen3_vl", "Qwen3VLText", TURNS),
        *(Sections((4, 2, 2), interleaved=True), None),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_vision_model_is_transformers(name):
    module, kind, rope, axes, scaling = TEXTS[name]
    extra = {"head_dim": 16} if kind == "Qwen3VLText" else {}
    config = config_of(
        f"{kind.removesuffix('Text')}TextConfig", **TEXT, rope_parameters=rope, **extra
    )
    x = RANDOM.standard_normal((2, 5, 3, 16))
    want = by_transformers(module, f"{kind}RotaryEmbedding", config, x, TIMES)
    rotary = Rotary(BASE, scaling=scaling, axes=axes)
    assert judge.same_function(rotary(jnp.asarray(x), TIMES), want[0]).ok
    gradient = jax.grad(lambda x: (rotary(x, TIMES) ** 3).sum())(jnp.asarray(x))
    assert judge.same_function(gradient, want[1]).ok


@pytest.mark.nightly
def test_the_tower_of_qwen2_vl():
    config = config_of("Qwen2VLConfig").vision_config
    config.embed_dim, config.num_heads = 32, 2
    config.rope_parameters = {"rope_type": "axial", "rope_theta": BASE}
    config.head_dim = 16
    x = RANDOM.standard_normal((5, 3, 16))
    found = ("qwen2_vl.modeling_qwen2_vl", "Qwen2VLVisionRotaryEmbedding", config)
    want, _ = by_transformers(*found, x, ROWS.T, apply="apply_rotary_pos_emb_vision")
    assert judge.same_function(Rotary(BASE, axes=Axial())(jnp.asarray(x), ROWS), want).ok


@pytest.mark.nightly
def test_the_tower_of_pixtral():
    rope = {"rope_type": "axial", "rope_theta": BASE}
    config = config_of(
        "PixtralVisionConfig", hidden_size=32, num_attention_heads=2, rope_parameters=rope
    )
    x = RANDOM.standard_normal((2, 5, 3, 16))
    found = ("pixtral.modeling_pixtral", "PixtralVisionRotaryEmbedding", config)
    positions = np.stack([ROWS, ROWS[::-1]])  # A B T
    want, _ = by_transformers(*found, x, np.moveaxis(positions, 0, 1))
    rotary = Rotary(BASE, axes=Axial(shared=True))
    assert judge.same_function(rotary(jnp.asarray(x), positions), want).ok


ONE = jnp.ones((2, 5, 1, 8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sections(()), r"sizes of Sections must be whole numbers; got \(\)"),
        (lambda: Sections((2, -1)), r"whole numbers; got \(2, -1\)"),
        (lambda: Sections((2, 5, 2), interleaved=True), r"sizes \(2, 5, 2\) an axis would miss"),
        (lambda: Rotary(axes=Sections((2, 1)))(ONE), r"sum to the 4 rotary pairs; got \(2, 1\)"),
        (lambda: Axial(0), "count of Axial must be a whole number of at least 1; got 0"),
        (lambda: Rotary(axes=Axial(3))(ONE, jnp.ones((3, 5), int)), "each of 3 axes; got 4 pairs"),
        (lambda: Rotary(axes=Axial())(ONE), r"shape \(2, \*batch, length\).*; got none"),
        (
            lambda: Rotary(axes=Sections((2, 1, 1)))(ONE, jnp.ones((2, 5), int)),
            r"\(axes, \*batch, length\) = \(3, 2, 5\), with all 3 axes there; got shape \(2, 5\)",
        ),
        (
            lambda: Rotary(axes=Sections((2, 1, 1)))(ONE, jnp.arange(5)),
            r"all 3 axes there; got shape \(5,\)",
        ),
        (
            lambda: Rotary(axes=Sections((2, 1, 1)))(ONE, jnp.ones((3, 3, 5), int)),
            r"\(2, 5\); got shape \(3, 5\)",
        ),
    ],
)
def test_wrong_axes_are_named_in_the_error(make, words):
    with pytest.raises(ValueError, match=words):
        make()
