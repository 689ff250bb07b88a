"""Norms of queries and keys, against numpy in float64 and, rounded, in bfloat16."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from flax_attn import LayerNorm, RMSNorm
from flax_attn.norms import l2_norm, layer_norm, rms_norm
from flax_attn.parity import judge

RANDOM = np.random.RandomState(0)
X, GAIN, BIAS = (RANDOM.standard_normal(s) for s in ((2, 7, 3, 4), 4, 4))
BF16 = ml_dtypes.bfloat16


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def rms(x, eps=0.3):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def centred(x):
    return x - x.mean(-1, keepdims=True)


# The function, and its formula.
FORMULAS = {
    "rms": (lambda x: rms_norm(x, eps=0.3), rms(X)),
    "rms with a gain": (lambda x: rms_norm(x, jnp.asarray(GAIN), eps=0.3), rms(X) * GAIN),
    "rms, cast before": (
        lambda x: rms_norm(x, jnp.asarray(GAIN), eps=0.3, cast="before"),
        rms(X) * GAIN,
    ),
    "rms, 1 + gain": (
        lambda x: rms_norm(x, jnp.asarray(GAIN), eps=0.3, plus_one=True),
        rms(X) * (1 + GAIN),
    ),
    "layer": (lambda x: layer_norm(x, eps=0.3), rms(centred(X))),
    "layer with a gain for each head": (
        lambda x: layer_norm(x, jnp.asarray(X[0, 0]), eps=0.3),
        rms(centred(X)) * X[0, 0],
    ),
    "layer with a bias": (
        lambda x: layer_norm(x, jnp.asarray(GAIN), jnp.asarray(BIAS), eps=0.3),
        rms(centred(X)) * GAIN + BIAS,
    ),
    "length one": (
        lambda x: l2_norm(x, eps=0.3),
        X / np.sqrt((X * X).sum(-1, keepdims=True) + 0.3),
    ),
    "length one, a floor": (
        lambda x: l2_norm(x, eps=2.0, floor=True),
        X / np.maximum(np.sqrt((X * X).sum(-1, keepdims=True)), 2.0),
    ),
}
of_all_formulas = pytest.mark.parametrize("name", FORMULAS)


@of_all_formulas
def test_norms_equal_their_formulas_in_numpy(name, float64):
    function, want = FORMULAS[name]
    got = jax.jit(function)(jnp.asarray(X))
    assert got.dtype == jnp.float64 and judge.same_function(got, want).ok


@pytest.mark.nightly
@of_all_formulas
def test_narrow_inputs_are_normed_in_float32(name, float64):
    x = jnp.asarray(X, jnp.bfloat16)
    function, _ = FORMULAS[name]
    got, wide = function(x), function(x.astype(jnp.float32))
    assert got.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    if "before" not in name:  # the gain follows the rounding there
        assert judge.exact(got, wide.astype(jnp.bfloat16)).ok


@pytest.mark.nightly
def test_layer_norm_keeps_precision_at_a_large_mean():
    x = jnp.asarray([4096.0, 4097.0, 4098.0, 4099.0], jnp.float32)
    want = centred(np.arange(4.0)) / np.sqrt(1.25)
    assert judge.same_precision(layer_norm(x, eps=0.0), want.astype("f4"), want, "float32").ok


@pytest.mark.nightly
def test_l2_norm_has_finite_gradients_at_zero():
    for floor in (False, True):
        gradient = jax.grad(lambda x, floor=floor: l2_norm(x, eps=0.5, floor=floor).sum())
        scale = 0.5 if floor else 0.5**0.5
        assert judge.exact(gradient(jnp.zeros(3)), np.full(3, 1 / scale, np.float32)).ok


@pytest.mark.parametrize(
    ("plus_one", "gain"),
    [(False, [0.5703125, 2.203125, 1.0, 0.71484375]), (True, [0.8984375, 1.8125, 1.859375, 1.8])],
)
def test_the_gain_comes_after_or_before_the_cast(plus_one, gain):
    x = np.asarray([1, 2, 3, 7], np.float32)  # whose mean of squares is exact
    gain = np.asarray(gain).astype(BF16)
    normed = x * (np.float32(1) / np.sqrt(np.float32(15.75)))
    before = normed.astype(BF16) * (BF16(1) + gain if plus_one else gain)
    after = (normed * (gain.astype("f4") + plus_one)).astype(BF16)
    assert (before != after).any()
    for cast, want in (("before", before), ("after", after)):
        options = {"eps": 0.0, "plus_one": plus_one, "cast": cast}
        norm = RMSNorm(4, **options, param_dtype=jnp.bfloat16)
        norm.scale[...] = jnp.asarray(gain)
        narrow = jnp.asarray(x, jnp.bfloat16)
        for got in (rms_norm(narrow, jnp.asarray(gain), **options), norm(narrow)):
            assert judge.exact(got, want).ok


@pytest.mark.nightly
def test_modules_start_from_a_gain_of_one_in_their_dtype():
    x = jnp.asarray(X, jnp.float32)
    made = RMSNorm(4, eps=0.3), RMSNorm(4, eps=0.3, plus_one=True), RMSNorm(None, eps=0.3)
    for norm in made:
        assert judge.exact(norm(x), rms_norm(x, eps=0.3)).ok
    for norm in (LayerNorm(4, eps=0.3, use_bias=True), LayerNorm(None, eps=0.3)):
        assert judge.exact(norm(x), layer_norm(x, eps=0.3)).ok
    assert made[1].scale[...].tolist() == [0.0] * 4 and made[2].scale is None
    assert RMSNorm(4, eps=0.3, param_dtype=jnp.bfloat16).scale[...].dtype == jnp.bfloat16
    assert LayerNorm((3, 4), eps=0.3).scale.shape == (3, 4)
    init = nnx.with_partitioning(nnx.initializers.normal(), ("heads",), eager_sharding=False)
    drawn = RMSNorm(4, eps=0.3, scale_init=init, rngs=nnx.Rngs(0))
    assert len({*drawn.scale[...].tolist()}) == 4
    assert "heads" in str(drawn.scale.get_metadata())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RMSNorm(0, eps=1e-6), r"features\[0\] must be a whole number .* got 0"),
        (lambda: RMSNorm(4, eps=-1.0), "eps must be zero or more; got -1.0"),
        (lambda: RMSNorm(4, eps=1e-6, cast="late"), "cast must be one of .*'late'"),
        (lambda: RMSNorm(None, eps=1e-6, plus_one=True), r"of a gain; RMSNorm\(None\) has none"),
        (lambda: RMSNorm(4, eps=1e-6, scale_init=jnp.ones), "pass rngs="),
        (lambda: RMSNorm(5, eps=1e-6)(X), r"gain of shape \(5,\); got x of shape \(2, 7, 3, 4\)"),
        (
            lambda: RMSNorm(4, eps=1e-6, over_heads=True)(X),
            r"shape \(4,\); got x of .*\(2, 7, 12\)",
        ),
        (lambda: LayerNorm((6, 4), eps=1e-6)(X), r"gain of shape \(6, 4\); got x of shape"),
        (lambda: LayerNorm((3, 0), eps=1e-6), r"features\[1\] must be a whole number"),
        (lambda: LayerNorm(4, eps=float("nan")), "eps must be zero or more; got nan"),
        (lambda: rms_norm(X, eps=1e-6, plus_one=True), "pass a scale"),
        (lambda: rms_norm(X, eps=1e-6, cast="late"), "cast must be one of .*'late'"),
        (lambda: l2_norm(X, eps=-1.0), "eps must be zero or more; got -1.0"),
    ],
)
def test_bad_arguments_of_norms_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
