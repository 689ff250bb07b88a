"""`flax_attention` in flax's own modules: the cases of flax's attention tests, and more.

Every case runs a module of `flax.nnx` or `flax.linen` by its own function and by ours, with the
same weights, in float64: outputs, gradients of all weights and inputs, and sown weights are the
same. The few that differ on purpose are `DIFFER` below, as the docstring of `flax_attention` says.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn import dot_product_attention, flax_attention
from flax_attn.parity import judge
from parity_tests.core.attend.flax_modules import (
    HEADS,
    WIDTH,
    as_flax_runs,
    both,
    by_linen,
    by_nnx,
    draw,
    same,
)
from parity_tests.tables import with_nightly

B, T, S = 2, 5, 7
X, Y, Z = draw(1, B, T, WIDTH), draw(2, B, S, WIDTH), draw(3, B, S, WIDTH)
DEEP = draw(4, B, 4, T, WIDTH)  # two batch axes
SEEN = np.random.RandomState(5).rand(B, 1, T, T) < 0.6
SEEN[..., 0] = True
ACROSS = np.concatenate([SEEN, SEEN], axis=-1)[..., :S]
PER_HEAD = np.random.RandomState(6).rand(B, HEADS, T, T) < 0.6
PER_HEAD[..., 0] = True
DROP = {"dropout_rate": 0.4, "deterministic": False}


def numbers(mask, dtype):
    return jnp.asarray(mask).astype(dtype)


# Configuration, inputs, call: taken by both libraries alike.
SHARED = {
    "self-attention": ({}, [X], {}),
    "no biases": ({"use_bias": False}, [X], {}),
    "norms of q and k": ({"normalize_qk": True}, [X], {}),
    "keys of another length": ({}, [X, Y], {}),
    "keys and values apart": ({}, [X, Y, Z], {}),
    "no batch axis": ({}, [X[0]], {}),
    "two batch axes": ({}, [DEEP], {}),
    "boolean mask": ({}, [X], {"mask": SEEN}),
    "mask of floats": ({}, [X], {"mask": numbers(SEEN, "float32")}),
    "mask of integers": ({}, [X], {"mask": numbers(SEEN, "int32")}),
    "mask for each head": ({}, [X], {"mask": PER_HEAD}),
    "mask for every entry": ({}, [X], {"mask": numbers(SEEN[:1], "float32")}),
    "mask across": ({}, [X, Y], {"mask": numbers(ACROSS, "float32")}),
    "causal mask": ({}, [X], {"mask": nnx.make_causal_mask(X[..., 0])}),
    "padding mask": ({}, [X], {"mask": nnx.make_attention_mask(X[..., 0] < 9, X[..., 1] > -1)}),
    "sown weights": ({}, [X], {"mask": SEEN, "sow_weights": True}),
    "dropout shared": (DROP, [X], {"mask": SEEN}),
    "dropout for each weight": ({**DROP, "broadcast_dropout": False}, [X, Y], {}),
    "dropout and sown weights": (DROP, [X], {"sow_weights": True}),
    "dropout turned off": ({"dropout_rate": 0.4}, [X], {"deterministic": True}),
    "dropout turned off by the module": ({**DROP, "deterministic": True}, [X], {}),
    "dropout turned on by the call": ({"dropout_rate": 0.4}, [X], {"deterministic": False}),
    "decoding": ({}, [X], {"steps": 2}),
    "decoding with a mask": ({}, [X], {"steps": 2, "mask": SEEN[:, :, :1]}),
    "decoding, weights sown": ({}, [X], {"steps": 2, "sow_weights": True}),
}
NNX = {
    "grouped queries": ({"num_heads": 6, "num_kv_heads": 2}, [X, Y], {}),
    "grouped queries, dropped": (
        {**DROP, "num_heads": 6, "num_kv_heads": 2, "broadcast_dropout": False},
        [X],
        {"sow_weights": True},
    ),
    "causal": ({}, [X], {"is_causal": True}),
    "causal and masked": ({}, [X], {"is_causal": True, "mask": numbers(SEEN, "float32")}),
    "causal, dropped": (DROP, [X], {"is_causal": True}),
    "decoding, causal": ({}, [X], {"steps": 2, "is_causal": True}),
    "streams at the call": ({**DROP, "keep_rngs": False}, [X], {"key": 3}),
}
LINEN = {
    "mask over two batch axes": ({}, [DEEP], {"mask": np.stack([SEEN] * 4, axis=1)}),
    "dropout over two batch axes": (DROP, [DEEP], {}),
    "dropout for each, two batch axes": ({**DROP, "broadcast_dropout": False}, [DEEP], {}),
    "dropout without a batch axis": (DROP, [X[0]], {}),
    "decoding over two batch axes": ({}, [DEEP], {"steps": 2}),
    "decoding without a batch axis": ({}, [X[0]], {"steps": 2}),
    "the alias": ({}, [X, Y], {"kind": linen.MultiHeadAttention}),
    "the alias, dropped": (DROP, [X], {"kind": linen.MultiHeadAttention}),
    "a key at the call": (DROP, [X], {"dropout_rng": jax.random.key(11)}),
    "an old key at the call": (DROP, [X], {"dropout_rng": jax.random.PRNGKey(11)}),
    "another dropout key": (DROP, [X], {"key": 8}),
}
CALLS = [
    *((by, name) for by in (by_nnx, by_linen) for name in SHARED),
    *((by_nnx, name) for name in NNX),
    *((by_linen, name) for name in LINEN),
]


TELL_MOST = ("mask for each head", "dropout for each weight", "norms of q and k")
OF_OWN_SHAPES = ("decoding with a mask", "grouped queries, dropped", "dropout over two batch axes")


@pytest.mark.filterwarnings("ignore:is_causal=True with one query")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("by", "name"),
    with_nightly(CALLS, commit=lambda call: call[1] in (*TELL_MOST, *OF_OWN_SHAPES)),
)
def test_a_flax_module_with_our_attention_gives_the_same_output(by, name):
    config, inputs, call = {**SHARED, **(NNX if by is by_nnx else LINEN)}[name]
    gradients = not name.startswith("decoding ")  # compiled for shapes that no other case has
    how = {"gradients": gradients, "whole": name in OF_OWN_SHAPES}
    got, want = both(by, config, inputs, **how, **call)
    same(got, want)
    assert bool(got.sown) == ("sow_weights" in call)


@pytest.mark.nightly
def test_what_a_call_asks_for_changes_the_result():
    """An argument that does not reach the arithmetic would fail here."""
    by = by_linen
    asked = ("boolean mask", "mask for each head", "dropout shared", "norms of q and k")
    plain, _ = both(by, {}, [X])
    for name in asked:
        config, inputs, call = SHARED[name]
        assert not judge.same_function(both(by, config, inputs, **call)[0].out, plain.out).ok
    one, other = (both(by, {**DROP, "broadcast_dropout": b}, [X])[0] for b in (True, False))
    assert not judge.same_function(one.out, other.out).ok


@pytest.mark.nightly
@pytest.mark.parametrize("by", [by_nnx, by_linen])
@pytest.mark.parametrize("config", [{}, DROP])
def test_sowing_changes_no_output(by, config):
    plain, sown = (both(by, config, [X], mask=SEEN, **c)[0] for c in ({}, {"sow_weights": True}))
    assert judge.exact(sown.out, plain.out).ok and len(sown.sown) == 1
    for name, x in plain.gradients.items():
        assert judge.exact(sown.gradients[name], x).ok, name


def test_the_signature_takes_all_that_flax_passes():
    """By name, and in flax's order as far as the two libraries share it."""
    mine = [*inspect.signature(flax_attention).parameters]
    for theirs in (nnx.dot_product_attention, linen.dot_product_attention):
        names = [*inspect.signature(theirs).parameters]
        assert names[:12] == mine[:12] and {*names} <= {*mine}


@pytest.mark.nightly
def test_linen_drops_what_a_signature_lacks():
    """This is why jax.nn's function cannot be used: dropout would be dropped silently."""
    with as_flax_runs(x64=True):
        config = {"param_dtype": jnp.float64, **DROP}
        silent = by_linen(dot_product_attention, config, [X])
        plain, dropped = (
            by_linen(flax_attention, {**config, **c}, [X]) for c in ({"deterministic": True}, {})
        )
    assert judge.same_function(silent.out, plain.out).ok
    assert not judge.same_function(dropped.out, plain.out).ok


# What differs on purpose: the only cases.

BLIND = SEEN.copy()
BLIND[1, 0, 2] = False
COMPLEX = {"param_dtype": jnp.complex64}


def rows_that_see_nothing(by):
    """Zeros before the last projection, where flax gives the mean of v."""
    got, want = both(by, {"use_bias": False}, [X], whole=True, mask=BLIND, sow_weights=True)
    seen = BLIND.any(-1)[:, 0]
    assert not got.out[~seen].any() and want.out[~seen].any()
    assert judge.same_function(got.out[seen], want.out[seen]).ok
    assert not got.sown[0][1, :, 2].any()
    return got, want


def nan_that_nobody_sees(by):
    """It stays in its place, where flax spreads it by 0 * NaN."""
    padded, mask = X.copy(), np.broadcast_to(np.arange(T) < 4, (B, 1, T, T))
    padded[:, 4] = np.nan
    got, want = both(by, {}, [X, padded], mask=mask)
    assert np.isfinite(got.out).all() and np.isnan(want.out).any()
    assert judge.same_function(got.out, both(by, {}, [X, X], mask=mask)[1].out).ok
    return got, want


def a_rate_of_one(by):
    """Zeros before the last projection, where flax gives NaN."""
    got, want = both(by, {**DROP, "dropout_rate": 1.0, "use_bias": False}, [X])
    assert not got.out.any() and np.isnan(want.out).any()
    return got, want


def float64_and_a_float32_softmax(by):
    """float64 stays, where Linen rounds its weights to float32."""
    config = {"force_fp32_for_softmax": True}
    got, want = both(by, config, [X])
    assert judge.same_function(got.out, both(by, {}, [X])[1].out).ok
    assert judge.allclose(got.out, want.out)
    return got, want


DIFFER = {
    "a query that sees nothing, nnx": (rows_that_see_nothing, by_nnx),
    "a query that sees nothing, linen": (rows_that_see_nothing, by_linen),
    "NaN that nobody sees": (nan_that_nobody_sees, by_linen),
    "a rate of 1": (a_rate_of_one, by_linen),
    "float64 and a float32 softmax": (float64_and_a_float32_softmax, by_linen),
}


@pytest.mark.nightly(but=["a query that sees nothing, linen"])
@pytest.mark.parametrize("name", DIFFER)
def test_documented_differences_from_flax_are_as_documented(name):
    case, by = DIFFER[name]
    got, want = case(by)
    with pytest.raises(AssertionError):
        same(got, want)


def test_complex_numbers_are_refused():
    """The sixth: Linen takes them."""
    with as_flax_runs(x64=False), pytest.raises(TypeError, match="floating arrays; got q complex"):
        by_linen(flax_attention, COMPLEX, [X])


def test_only_documented_arguments_differ_from_flax():
    told = flax_attention.__doc__.partition("on purpose:")[2].partition("Source:")[0]
    assert told.count("\n    * ") == 6 and len(DIFFER) + 1 <= 6
