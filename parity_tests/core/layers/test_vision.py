"""Image layers under jit and vmap, in bfloat16, with one token, and with NaN in padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    AttentionPool,
    WindowAttention,
)
from flax_attn.parity import judge
from parity_tests.core import layer_facts
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

LAYERS = layer_facts.VISION
PADDED = [name for name in LAYERS if name != "spatial reduction"]
VALID = np.asarray([True, False, True, True, False, True, False])
of_two = pytest.mark.parametrize("name", with_nightly(LAYERS, commit=2))


def build(name, **more):
    kind, config, shape = LAYERS[name]
    given = {"param_dtype": jnp.float64, **config, **more}
    return kind(12, 3, **given, rngs=nnx.Rngs(0)), normal(1, 3, *shape)


@nnx.jit
def compiled(layer, x):
    return layer(x)


def outline(layer, x):
    """The shape and dtype of what a layer gives."""
    return jax.eval_shape(layer, x)


@nnx.jit
def both_ways(layer, x, cotangent):
    """The output and the gradient of x."""
    out, back = jax.vjp(layer, x)
    return out, back(cotangent)[0]


def same(got, want):
    return judge.same_function(np.asarray(got), np.asarray(want)).ok


@pytest.mark.nightly
@of_two
def test_jit_and_vmap_change_nothing(name):
    layer, x = build(name)
    want = layer(x)
    assert same(compiled(layer, x), want)
    assert same(nnx.jit(lambda layer, x: jax.vmap(layer)(x))(layer, x), want)
    assert same(np.stack([compiled(layer, one) for one in x]), want)


@pytest.mark.nightly
@of_two
def test_a_bfloat16_layer_gives_bfloat16_outputs_and_gradients(name):
    layer, x = build(name, param_dtype=jnp.bfloat16)  # promotion is strict in tests
    x = jnp.asarray(x, jnp.bfloat16)
    out, gradient = both_ways(layer, x, np.ones(outline(layer, x).shape, jnp.bfloat16))
    assert out.dtype == gradient.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32).sum())
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.nightly
@of_two
def test_outputs_and_gradients_of_a_single_token_are_finite(name):
    layer, x = build(name)
    one = x[:, :2, :2] if name == "spatial reduction" else x[:, :1]
    out, gradient = both_ways(layer, one, np.ones(outline(layer, one).shape))
    assert out.shape == one.shape and np.isfinite(out).all() and np.isfinite(gradient).all()


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(PADDED, commit=2))
def test_padding_does_not_change_the_real_tokens(name):
    layer, x = build(name)
    holes = np.where(VALID[:, None], x, np.nan)

    @nnx.jit
    def padded(layer, x, cotangent):
        def shown(x):
            y = layer(x, valid=VALID)
            return y if name == "class" else y[:, VALID]

        out, back = jax.vjp(shown, x)
        return out, back(cotangent)[0], layer(x, valid=VALID)

    cotangent = normal(2, *outline(layer, x[:, VALID]).shape)
    out, gradient, whole = map(np.asarray, padded(layer, holes, cotangent))
    plain, want = both_ways(layer, x[:, VALID], cotangent)
    assert same(out, plain)
    assert same(gradient[:, VALID], want) and not np.any(gradient[:, ~VALID])
    if name != "class":
        assert not np.any(whole[:, ~VALID])


@pytest.mark.parametrize("shift", [(1, 0), (0, 2)])
def test_windows_shifted_along_one_axis_are_masked_at_the_edge(shift):
    layer = WindowAttention(12, (2, 3), 3, shift=shift, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    x = normal(1, 5, 4, 9, 12)
    other = x.copy()
    last = np.s_[:, -1] if shift[0] else np.s_[:, :, -1]
    other[last] = normal(2, *x[last].shape)
    first = np.s_[:, 0] if shift[0] else np.s_[:, :, :2]
    one, two = (np.asarray(compiled(layer, x)) for x in (x, other))
    assert judge.exact(one[first], two[first]).ok and not np.array_equal(one, two)


def test_talking_heads_with_a_causal_mask_read_no_later_token():
    layer, x = build("talking heads", mask=CAUSAL)
    later = x.copy()
    later[:, 4:] = 9.0
    one, other = (np.asarray(compiled(layer, x))[:, :4] for x in (x, later))
    assert judge.exact(one, other).ok


@pytest.mark.nightly
def test_attention_pool_of_no_tokens_returns_its_output_bias():
    layer = AttentionPool(12, 3, 2, rngs=nnx.Rngs(0))
    y = layer(jnp.zeros((4, 0, 12), jnp.float32))
    assert judge.exact(np.asarray(y), np.broadcast_to(layer.out_proj.bias[...], (4, 2, 12))).ok
