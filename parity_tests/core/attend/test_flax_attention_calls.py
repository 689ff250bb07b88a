"""`flax_attention` called by itself: with a bias, on blocks, and with what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn import attend, flax_attention, use_backend
from flax_attn.parity import judge
from parity_tests.core.attend.flax_modules import as_flax_runs, draw
from parity_tests.core.backends.refusal import refused, told

B, T, S, N, H = 2, 5, 7, 3, 4
KEY = jax.random.key(3)
SEEN = np.random.RandomState(5).rand(B, 1, T, S) < 0.6
SEEN[..., 0] = True
CALLS = {
    "bias": {"bias": draw(5, B, N, T, S)},
    "bias of keys": {"bias": draw(5, B, 1, 1, S)},
    "whole numbers as a bias": {"bias": np.arange(S).reshape(1, 1, 1, S) % 3},
    "bias, masked": {"bias": draw(5, B, N, T, S), "mask": SEEN},
    "dropped": {"dropout_rate": 0.3, "dropout_rng": KEY},
    "a rate of numpy's": {"dropout_rate": np.float32(0.25), "dropout_rng": KEY},
    "a rate of jax's": {"dropout_rate": jnp.float32(0.25), "dropout_rng": KEY},
    "a drop for each": {"dropout_rate": 0.3, "dropout_rng": KEY, "broadcast_dropout": False},
    "deterministic": {"dropout_rate": 0.3, "dropout_rng": KEY, "deterministic": True},
}


def qkv(dtype=None, h=H):
    shapes = (B, T, N, H), (B, S, N, H), (B, S, N, h)
    return [jnp.asarray(draw(i, *shape), dtype) for i, shape in enumerate(shapes)]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CALLS)
def test_a_call_equals_linen_attention(name):
    given = CALLS[name]
    with as_flax_runs(x64=True):
        want, got = (
            np.asarray(fn(*qkv(h=6), **given))
            for fn in (linen.dot_product_attention, flax_attention)
        )
    assert judge.same_function(got, want).ok


def test_one_causal_query_with_many_keys_warns():
    q, k, v = qkv()
    with pytest.warns(UserWarning, match="shows it key 0 alone, as in flax.*leave is_causal out"):
        alone = flax_attention(q[:, :1], k, v, is_causal=True)
    assert judge.same_function(alone[:, 0], v[:, 0]).ok


@pytest.mark.nightly
def test_a_bias_receives_its_gradient():
    bias = draw(5, 1, N, T, S)
    with as_flax_runs(x64=True):
        want, got = (
            np.asarray(jax.grad(lambda b: (fn(*qkv(), b, SEEN) ** 2).sum())(jnp.asarray(bias)))  # noqa: B023
            for fn in (linen.dot_product_attention, flax_attention)
        )
    assert judge.same_function(got, want).ok


@pytest.mark.nightly(but=["False"])
@pytest.mark.parametrize("broadcast", [True, False])
def test_blockwise_dropout_drops_the_same_weights(broadcast):
    """Beyond 128 x 128 weights "auto" leaves the plain formula; the drop stays flax's."""
    q = jnp.asarray(draw(1, 130, 2, 3), "float32")
    given = {"dropout_rate": 0.3, "dropout_rng": KEY, "broadcast_dropout": broadcast}

    def compiled(fn, **given):
        return jax.jit(lambda q: fn(q, q, q, **given))(q)

    got = compiled(flax_attention, **given, is_causal=True)
    with use_backend("reference"):
        want = compiled(flax_attention, **given, is_causal=True)
    with as_flax_runs(x64=False):
        theirs = compiled(nnx.dot_product_attention, **given, is_causal=True)
    plain = compiled(attend)
    assert (
        judge.allclose(got, want) and judge.allclose(got, theirs) and not judge.allclose(got, plain)
    )


DROPPED = {"dropout_rate": 0.5}
ONES = {
    "query": np.ones((B, T, N, H)),
    "key": np.ones((B, S, N, H)),
    "value": np.ones((B, S, N, H)),
}
REFUSED = {
    "no key": (DROPPED, ValueError, ["dropout_rate=0.5 needs a dropout_rng", "deterministic=True"]),
    "rate": ({"dropout_rate": 1.5}, ValueError, ["dropout_rate", "0 to 1", "got 1.5"]),
    "rate unused": (
        {"dropout_rate": -1, "deterministic": True},
        ValueError,
        ["dropout_rate", "got -1"],
    ),
    "deterministic": ({"deterministic": None}, TypeError, ["deterministic must be True or False"]),
    "broadcast": ({"broadcast_dropout": 1}, TypeError, ["broadcast_dropout must be", "got 1"]),
    "causal": ({"is_causal": "yes"}, TypeError, ["is_causal must be True or False"]),
    "forced": ({"force_fp32_for_softmax": 0}, TypeError, ["force_fp32_for_softmax must be"]),
    "mask turned": ({"mask": np.ones((S, T), bool)}, ValueError, ["(2, 3, 5, 7)", "(7, 5)"]),
    "mask to spare": ({"mask": np.ones((1, B, N, T, S))}, ValueError, ["(1, 2, 3, 5, 7)"]),
    "mask of keys": ({"mask": jax.random.split(KEY, S)}, TypeError, ["mask must be boolean, or"]),
    "complex mask": ({"mask": np.ones(S, complex)}, TypeError, ["mask must be", "complex64"]),
    "boolean bias": (
        {"bias": np.ones(S, bool)},
        TypeError,
        ["bias must be floating", "got bool", "pass mask="],
    ),
    "bias turned": ({"bias": np.ones((S, T))}, ValueError, ["(2, 3, 5, 7)", "(7, 5)"]),
    "rank": ({"query": np.ones((T, H))}, ValueError, ["length, heads, width", "query (5, 4)"]),
    "batch": ({"query": np.ones((T, N, H))}, ValueError, ["must share their batch axes"]),
    "heads": ({"query": np.ones((B, T, 4, H))}, ValueError, ["must divide the query heads"]),
    "complex": ({"query": np.ones((B, T, N, H), complex)}, TypeError, ["floating", "complex64"]),
    "products": (
        {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
        NotImplementedError,
        ["qk_attn_weights_einsum and attn_weights_value_einsum", "own attention_fn"],
    ),
    "dot_general": (
        {"einsum_dot_general": lambda *args: None},
        NotImplementedError,
        ["cannot serve einsum_dot_general"],
    ),
    "module": ({"module": object()}, TypeError, ["flax.linen module", "got object"]),
}


@pytest.mark.nightly(
    but=["boolean bias", "dot_general", "forced", "mask of keys", "module", "no key", "rank"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_flax_arguments_are_refused(name):
    wrong, kind, words = REFUSED[name]
    arrays = {name: jnp.asarray(x) for name, x in {**ONES, **wrong}.items() if name in ONES}
    rest = {name: x for name, x in wrong.items() if name not in ONES}
    with jax.numpy_dtype_promotion("standard"):
        # Sown weights come before the check of the module, so that products have been taken there.
        with (told if name == "module" else refused)(kind, *words):
            flax_attention(**arrays, **rest)


@pytest.mark.nightly
def test_jaxs_own_dot_general_is_no_other_product():
    q, k, v = qkv("float32")
    got = flax_attention(q, k, v, einsum_dot_general=jax.lax.dot_general)
    assert judge.exact(np.asarray(got), np.asarray(flax_attention(q, k, v))).ok


@pytest.mark.nightly
@pytest.mark.parametrize("names", [("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")])
def test_a_linen_module_with_einsums_of_its_own_is_refused(names):
    layer = linen.MultiHeadDotProductAttention(
        3, attention_fn=flax_attention, **{name: lambda: jnp.einsum for name in names}
    )
    with as_flax_runs(x64=False), told(NotImplementedError, "qk_attn_weights_einsum"):
        layer.init(jax.random.key(0), jnp.ones((2, 5, 12)))
