"""Caches in eight bits: attention uses the rounded values, for every cut into calls."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Float8, Int8, Prefix, Window, use_backend
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

from .cuts import empty, jitted, joined, same, stepped, tokens, whole

pytestmark = pytest.mark.usefixtures("float64")
STORES = {"int8": Int8(), "float8": Float8()}
MADE = {
    "static": ({"length": 14}, CAUSAL),
    "ring": (
        {"length": 14, "window": 4, "keep_first": 2},
        CAUSAL & (Window(3, 0) | Prefix(2)),
    ),
}


def rounded(store, x):
    """Keys and values as a store returns them."""
    of = jax.jit(lambda y: store.quantize(y).dequantized(jnp.float64))
    return [np.asarray(of(x[name])) for name in "kv"]


@pytest.mark.nightly(but=["float8-ring"])
@pytest.mark.parametrize(("store", "made"), with_nightly(product(STORES, MADE), commit=3))
def test_every_cut_gives_attention_over_what_was_stored(store, made):
    (how, mask), x = MADE[made], tokens(length=14)
    k, v = rounded(STORES[store], x)
    want, step = whole({"q": x["q"], "k": k, "v": v}, mask=mask), jitted(mask=mask)
    no_tokens = jax.jit(lambda: empty(store=STORES[store], **how))()
    for cut in ((14,), (5, 1, 1, 1, 1, 5)):
        o, cache = stepped(x, no_tokens, cut, step=step)
        assert same(o, want), cut
        assert cache.keys.values.dtype.itemsize == 1
    with use_backend("reference"):
        o, _ = stepped(x, no_tokens, (13, 1), mask=mask)
    assert same(o, want)


@pytest.mark.nightly
@pytest.mark.parametrize("store", STORES)
def test_eight_bit_outputs_are_close_to_full_precision(store):
    x = tokens(length=14)
    o, _ = stepped(x, empty(length=14, store=STORES[store]), (13, 1))
    want = np.asarray(whole(x, mask=CAUSAL))
    error = np.abs(o - want).max() / np.abs(want).max()
    assert 1e-4 < error < {"int8": 0.02, "float8": 0.1}[store]


def test_rows_taken_back_emptied_and_put_in_keep_their_scales():
    x = tokens(length=14)
    step, no_tokens = jitted(mask=CAUSAL), jax.jit(lambda: empty(length=20, store=Int8()))()
    _, cache = stepped({n: y[:, :9] for n, y in x.items()}, no_tokens, (9,), step=step)

    @jax.jit
    def changed(cache):
        one = jax.tree.map(lambda y: y[:1], cache)
        rows = cache.truncate(5).take(np.asarray([2, 1, 0]))
        return rows.reset(np.asarray([False, True, False])).insert(1, one)

    o, _ = stepped({n: y[:, 9:10] for n, y in x.items()}, changed(cache), (1,), step=step)
    k, v = rounded(Int8(), x)
    for row, (of, upto) in enumerate([(2, 5), (0, 9), (0, 5)]):
        keys, values = (joined([y[of, :upto], y[row, 9:10]]) for y in (k, v))
        assert same(o[row], whole({"q": x["q"][row, 9:10], "k": keys, "v": values}))
