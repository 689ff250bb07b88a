"""`flax_attn.dot_product_attention` in the place of `jax.nn.dot_product_attention`.

The truth is float64 numpy; in narrower dtypes jax.nn's own error against it is the measure.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import dot_product_attention
from flax_attn.parity import judge
from parity_tests.core.drawing import normal as draw
from parity_tests.requests.oracle import plain
from parity_tests.tables import with_nightly

B, T, S, N, H = 2, 7, 9, 6, 8
QUERIES, KEYS = np.asarray([7, 4], np.int32), np.asarray([3, 9], np.int32)


def some(*shape):
    """A random mask in which every query sees the first key."""
    seen = np.random.RandomState(5).rand(*shape) < 0.6
    seen[..., 0] = True
    return seen


# Every argument alone and where two meet; K, then what is handed over.
GRID = {
    "nothing": (3, {}),
    "one key head": (1, {}),
    "as many key heads": (6, {}),
    "scale": (3, {"scale": 0.7}),
    "bias": (3, {"bias": draw(6, B, N, T, S)}),
    "bias for every entry": (3, {"bias": draw(6, 1, N, T, S)}),
    "bias for every head": (2, {"bias": draw(6, B, 1, T, S)}),
    "bias of keys": (3, {"bias": draw(6, B, 1, 1, S)}),
    "bias of rank 3": (3, {"bias": draw(6, N, T, S)}),
    "mask": (3, {"mask": some(B, N, T, S)}),
    "mask for every head": (2, {"mask": some(B, 1, T, S)}),
    "mask of keys": (3, {"mask": some(1, 1, S)}),
    "causal": (3, {"is_causal": True}),
    "window": (3, {"local_window_size": 2}),
    "wider to the left": (3, {"local_window_size": (3, 1)}),
    "causal window": (3, {"is_causal": True, "local_window_size": (3, 2)}),
    "query lengths": (3, {"query_seq_lengths": QUERIES}),
    "key lengths": (3, {"key_value_seq_lengths": KEYS}),
    "both lengths": (3, {"query_seq_lengths": QUERIES, "key_value_seq_lengths": KEYS}),
    "causal lengths": (
        3,
        {"is_causal": True, "query_seq_lengths": QUERIES, "key_value_seq_lengths": KEYS},
    ),
    "masked lengths": (3, {"mask": some(B, N, T, S), "key_value_seq_lengths": KEYS}),
    "causal bias": (3, {"bias": draw(6, B, N, T, S), "is_causal": True}),
    "masked bias, scaled": (
        2,
        {"bias": draw(6, 1, N, T, S), "mask": some(B, 1, T, S), "scale": 0.3},
    ),
}


def seen_by(given):
    """What jax's documentation says of these arguments, as one array."""
    t, s = np.arange(T)[:, None], np.arange(S)
    seen = np.ones((B, N, T, S), bool) & given.get("mask", True)
    if given.get("is_causal"):
        seen &= s <= t
    if "local_window_size" in given:
        size = given["local_window_size"]
        left, right = size if isinstance(size, tuple) else (size, size)
        seen &= (t - left <= s) & (s <= t + right)
    if "query_seq_lengths" in given:
        seen &= t < given["query_seq_lengths"][:, None, None, None]
    if "key_value_seq_lengths" in given:
        seen &= s < given["key_value_seq_lengths"][:, None, None, None]
    return seen


def drawn(K, given):
    """q, k, v and the bias, if there is one, by name, and a cotangent of the output."""
    q, k, v = draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H)
    arrays = {"q": 2 * q, "k": k, "v": v}
    if "bias" in given:
        arrays["bias"] = given["bias"]
    rounded = {name: np.float64(np.float32(x)) for name, x in arrays.items()}
    return rounded, np.float64(np.float32(draw(3, B, T, N, H)))


def run(attend, arrays, cotangent, given):
    """Outputs and gradients under jit, by name; numpy arrays in float32."""
    given = {name: x for name, x in given.items() if name != "bias"}

    def call(arrays):
        bias = arrays.get("bias")
        q, k, v = (arrays[name] for name in "qkv")
        return attend(q, k, v, bias, return_residual=True, **given)

    @jax.jit
    def both(arrays, cotangent):
        (out, lse), back = jax.vjp(call, arrays)
        return {"out": out, "lse": lse, **back((cotangent, jnp.zeros_like(lse)))[0]}

    arrays, cotangent = jax.tree.map(lambda x: jnp.asarray(x, "float32"), (arrays, cotangent))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for jax.nn
        return {name: np.asarray(x) for name, x in both(arrays, cotangent).items()}


def truth_of(arrays, cotangent, given):
    q, k, v = (arrays[name] for name in "qkv")
    rules = {"bias": arrays.get("bias"), "scale": given.get("scale"), "seen": seen_by(given)}
    found = plain(q, k, v, cotangent, **rules)
    return {"out": found["o"], "lse": found["lse"]} | {name: found[name] for name in arrays}


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(GRID, commit=4))
def test_same_precision_as_jax(name):
    """Where jax.nn means the same: all but the gradient of the residual and rows without one."""
    K, given = GRID[name]
    asked = *drawn(K, given), given
    want = truth_of(*asked)
    functions = jax.nn.dot_product_attention, dot_product_attention
    jaxs, got = (run(f, *asked) for f in functions)
    seen = np.isfinite(want["lse"])
    assert np.isneginf(got["lse"][~seen]).all()
    want, jaxs, got = ({**x, "lse": np.where(seen, x["lse"], 0)} for x in (want, jaxs, got))
    everything = judge.whole_gradient([x for part, x in want.items() if part in "q k v bias"])
    for part, x in want.items():
        size = None if part in ("out", "lse") else everything
        assert got[part].dtype == np.float32
        verdict = judge.same_precision(got[part], jaxs[part], x, "float32", size)
        assert verdict.ok, (part, verdict)


# What is the same, and what is not on purpose.


def test_the_drop_in_has_the_signature_of_jax_nn():
    mine, jaxs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert mine == jaxs
