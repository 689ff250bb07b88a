"""Keys and values in eight bits: what comes back, and attention that reads them as they lie."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Additive, Causal, Dropout, Lengths, Softcap, reference
from flax_attn.backends.local import attend_locally
from flax_attn.cache import stored
from flax_attn.parity import judge
from flax_attn.quantized import Float8, Int8, Quantized
from flax_attn.rules import Rules, bind_rules
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

STORES = {"int8": Int8(), "float8": Float8()}
of_stores = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


# What is stored.


@pytest.mark.nightly
def test_int8_is_the_nearest_multiple_of_a_127th_of_the_largest():
    x = normal(0, 2, 3, 5, 7)
    found = Int8().quantize(jnp.asarray(x))
    scale = np.abs(x).max(-1) / 127
    assert found.values.dtype == jnp.int8 and found.scale.dtype == x.dtype
    assert judge.same_function(np.asarray(found.scale), scale).ok
    assert np.array_equal(found.values, np.round(x / scale[..., None]))
    assert np.abs(found.dequantized(x.dtype) - x).max() <= scale.max() / 2 * (1 + 1e-12)


@pytest.mark.nightly
def test_float8_keeps_four_bits_of_each_number():
    x = normal(1, 2, 3, 5, 7)
    found = Float8().quantize(jnp.asarray(x))
    back = np.asarray(found.dequantized(x.dtype))
    assert found.values.dtype == jnp.float8_e4m3fn
    assert np.abs(np.asarray(found.values, float)).max() == 448
    small = np.asarray(found.scale)[..., None] * 2.0**-9  # a number below the least normal one
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, small)).all()


@pytest.mark.nightly
@of_stores
def test_zeros_stay_zeros_and_what_is_not_finite_becomes_nan(store):
    x = np.ones((1, 6, 4), np.float32)
    x[0, 0], x[0, 1], x[0, 2, 1], x[0, 3, 2] = 0, 1e-45, np.nan, np.inf
    found = store.quantize(jnp.asarray(x))
    back = np.asarray(found.dequantized(jnp.float32))
    assert not back[0, :2].any() and np.array_equal(back[0, 4:], x[0, 4:])
    assert np.isnan(back[0, 2:4]).all()
    assert np.isfinite(np.asarray(found.values, float)).all()


@pytest.mark.nightly
@of_stores
def test_a_store_is_a_value_that_programs_take(store):
    narrow = store.quantize(jnp.ones((2, 3, 5), jnp.bfloat16))
    assert narrow.scale.dtype == jnp.float32 and narrow.shape == (2, 3, 5)
    assert narrow.dtype == store.dtype and narrow.dequantized(jnp.bfloat16).dtype == jnp.bfloat16
    assert len(jax.tree.leaves(narrow)) == 2 and type(store)() == store and hash(store)
    with pytest.raises(TypeError, match="stores floating arrays; got int32"):
        store.quantize(jnp.ones((2, 3, 5), jnp.int32))


# Attention.

S, K, G, H, h = 1100, 2, 3, 8, 5
RULES = {
    "a row for each length": ((3,), 2, lambda: Rules(Lengths(np.asarray([700, 40, 1100])))),
    "all at once": (
        (),
        4,
        lambda: Rules(
            Causal("end"),
            Softcap(2.0) >> Additive(normal(5, G * K, 4, S)),
            sinks=normal(6, G * K),
            dropout=Dropout(0.3, jax.random.key(1)),
        ),
    ),
    "many queries": ((1, 2), 30, lambda: Rules(CAUSAL)),
}


def outcome(run, *given):
    """Output, lse and the gradients of `given` by random cotangents of both."""
    (o, stats), back = jax.vjp(run, *given)
    do = normal(8, *o.shape)
    dstats = type(stats)(jnp.zeros_like(stats.m), normal(9, *stats.l.shape) / stats.l)
    return [o, stats.lse, *back((do, dstats))]


@pytest.mark.nightly
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("store", with_nightly([*STORES.values()], commit=2), ids=STORES)
def test_attention_is_the_plain_formula_of_what_the_store_means(store, name):
    batch, T, make = RULES[name]
    q = jnp.asarray(normal(0, *batch, T, G * K, H))
    shapes = (*batch, K, S, H), (*batch, K, S, h)
    keys, values = (
        store.quantize(jnp.asarray(normal(i, *s))) for i, s in enumerate(shapes, start=1)
    )
    wide = [jnp.swapaxes(x.dequantized(q.dtype), -3, -2) for x in (keys, values)]
    rules = make()

    def ours(q, scale):
        return stored.attention(q, keys, values, replace(rules, scale=scale))

    def plain(q, scale):
        asked = bind_rules(q, wide[0], replace(rules, scale=scale))
        return attend_locally(reference.attention, q, *wide, asked, "zero")

    given = q, jnp.asarray(0.4)
    got = jax.jit(lambda *x: outcome(ours, *x))(*given)
    for a, b in zip(got, jax.jit(partial(outcome, plain))(*given), strict=True):
        assert judge.same_function(np.asarray(a), np.asarray(b)).ok


@pytest.mark.nightly
@of_stores
@pytest.mark.parametrize("at", [slice(None), slice(0, 300)], ids=["in blocks", "in one"])
def test_nan_in_a_masked_slot_reaches_no_output(store, at):
    arrays = [normal(i, 1, n, s, 4) for i, (n, s) in enumerate(((2, 1), (2, S), (2, S)))]
    q, keys, values = jnp.swapaxes(jnp.asarray(arrays[0]), 1, 2), *arrays[1:]
    rules, found = Rules(Lengths(np.asarray([200]))), []
    for fill in (0.0, np.nan):
        for x in (keys, values):
            x[:, :, 200:] = fill
        stores = [store.quantize(jnp.asarray(x[:, :, at])) for x in (keys, values)]
        found.append(stored.attention(q, *stores, rules)[0])
    assert np.isfinite(found[0]).all() and np.array_equal(*found)


def test_keys_and_values_that_do_not_fit_are_refused():
    q, keys = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 2, 5, 8))
    with pytest.raises(TypeError, match="both be Quantized or both be arrays; got Quantized"):
        stored.attention(q, Int8().quantize(keys), keys, Rules())
    with pytest.raises(ValueError, match=r"lie as \*B K S H beside q"):
        stored.attention(q, keys, keys[:1], Rules())
    with pytest.raises(ValueError, match="must divide the query heads"):
        stored.attention(q[:, :, :3], keys, keys, Rules())


@pytest.mark.nightly
def test_gradients_reach_keys_and_values_that_are_arrays():
    q, keys = jnp.asarray(normal(0, 1, 4, 8)), jnp.asarray(normal(1, 2, 5, 8))
    grads = jax.grad(lambda *x: stored.attention(*x, Rules())[0].sum(), (0, 1, 2))(q, keys, keys)
    assert all(np.abs(np.asarray(g)).sum() > 0 for g in grads)


@pytest.mark.nightly
def test_the_gradient_of_what_is_stored_in_eight_bits_is_zero():
    q, keys = jnp.ones((1, 4, 8)), Int8().quantize(jnp.asarray(normal(1, 2, 5, 8)))

    def total(scale):
        return stored.attention(q, Quantized(keys.values, scale), keys, Rules())[0].sum()

    assert not jax.grad(total)(keys.scale).any()
