"""Layers of images under jit and vmap, in bfloat16, of one token; padding that holds NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    AttentionPool,
    ClassAttention,
    CrossCovarianceAttention,
    SpatialReductionAttention,
    TalkingHeadsAttention,
)
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

LAYERS = {
    "talking heads": (TalkingHeadsAttention, {}, (7, 12)),
    "class": (ClassAttention, {}, (7, 12)),
    "cross-covariance": (CrossCovarianceAttention, {"qkv_bias": True}, (7, 12)),
    "spatial reduction": (SpatialReductionAttention, {"ratio": 2}, (4, 5, 12)),
}
PADDED = [name for name in LAYERS if name != "spatial reduction"]
VALID = np.asarray([True, False, True, True, False, True, False])
of_two = pytest.mark.parametrize("name", with_nightly(LAYERS, commit=2))


def build(name, **more):
    kind, config, shape = LAYERS[name]
    given = {"param_dtype": jnp.float64, **config, **more}
    return kind(12, 3, **given, rngs=nnx.Rngs(0)), normal(1, 3, *shape)


def same(got, want):
    return judge.same_function(np.asarray(got), np.asarray(want)).ok


@of_two
def test_jit_and_vmap_change_nothing(name):
    layer, x = build(name)
    want = layer(x)
    assert same(nnx.jit(lambda m, x: m(x))(layer, x), want)
    assert same(jax.vmap(layer)(x), want)
    assert same(jnp.stack([layer(one) for one in x]), want)


@of_two
def test_16_bits_stay_16_bits(name):
    layer, x = build(name, param_dtype=jnp.bfloat16)  # promotion is strict in tests
    out, gradient = jax.value_and_grad(lambda x: layer(x).astype(jnp.float32).sum())(
        jnp.asarray(x, jnp.bfloat16)
    )
    assert layer(jnp.asarray(x, jnp.bfloat16)).dtype == gradient.dtype == jnp.bfloat16
    assert np.isfinite(out) and np.isfinite(np.asarray(gradient, np.float32)).all()


@of_two
def test_one_token_is_enough(name):
    layer, x = build(name)
    one = x[:, :2, :2] if name == "spatial reduction" else x[:, :1]
    out, back = jax.vjp(layer, one)
    (gradient,) = back(jnp.ones_like(out))
    assert out.shape == one.shape and np.isfinite(out).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", with_nightly(PADDED, commit=2))
def test_padding_is_as_if_it_were_not_there(name):
    layer, x = build(name)
    holes = np.where(VALID[:, None], x, np.nan)

    def padded(x):
        y = layer(x, valid=VALID)
        return y if name == "class" else y[:, VALID]

    out, back = jax.vjp(padded, holes)
    plain, plain_back = jax.vjp(layer, x[:, VALID])
    cotangent = jnp.asarray(normal(2, *out.shape))
    assert same(out, plain)
    (gradient,), (want,) = back(cotangent), plain_back(cotangent)
    assert same(gradient[:, VALID], want) and not np.any(gradient[:, ~VALID])
    if name != "class":
        assert not np.any(layer(holes, valid=VALID)[:, ~VALID])


def test_talking_heads_do_not_look_ahead():
    layer, x = build("talking heads", mask=CAUSAL)
    later = x.copy()
    later[:, 4:] = 9.0
    assert judge.exact(np.asarray(layer(x)[:, :4]), np.asarray(layer(later)[:, :4])).ok


def test_a_pool_of_no_tokens_gives_its_bias():
    layer = AttentionPool(12, 3, 2, rngs=nnx.Rngs(0))
    y = layer(jnp.zeros((4, 0, 12), jnp.float32))
    assert judge.exact(np.asarray(y), np.broadcast_to(layer.out_proj.bias[...], (4, 2, 12))).ok
