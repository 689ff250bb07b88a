"""However a sequence is cut into calls, outputs are those of one call over the whole."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    Alibi,
    Chunked,
    Lengths,
    Prefix,
    Softcap,
    Window,
    attend,
    attend_cached,
)
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

from . import cuts
from .cuts import CUTS, N, T, empty, h, jitted, paged, same, stepped, tokens, without_padding

pytestmark = pytest.mark.usefixtures("float64")

SINKS = np.linspace(-1, 2, N)
SLOPES = np.linspace(0.1, 0.7, N)

# What is asked, and how the cache is made; every kind keeps all that its mask shows.
KINDS = {
    "static": ({"mask": CAUSAL}, {}),
    "longer than needed": ({"mask": CAUSAL, "sinks": SINKS}, {"length": 40}),
    "window in a static cache": ({"mask": CAUSAL & Window(5, 0)}, {}),
    "ring of one token": ({"mask": CAUSAL & Window(0, 0)}, {"window": 1}),
    "ring of two": ({"mask": CAUSAL & Window(1, 0), "sinks": SINKS}, {"window": 2}),
    "ring of seven": ({"mask": CAUSAL & Window(6, 0)}, {"window": 7, "length": 100}),
    "ring of all": ({"mask": CAUSAL & Window(30, 0)}, {"window": 31, "length": 100}),
    "ring longer than all": ({"mask": CAUSAL & Window(39, 0)}, {"window": 40, "length": 100}),
    "ring with spare": ({"mask": CAUSAL & Window(3, 0)}, {"window": 4, "spare": 4}),
    "first tokens kept": (
        {"mask": CAUSAL & (Window(3, 0) | Prefix(2))},
        {"window": 4, "keep_first": 2},
    ),
    "first tokens and spare": (
        {"mask": CAUSAL & (Window(3, 0) | Prefix(3)), "scale": 0.7},
        {"window": 4, "keep_first": 3, "spare": 1},
    ),
    "chunks in a ring": ({"mask": CAUSAL & Chunked(6)}, {"window": 6}),
    "alibi in a ring": (
        {"mask": CAUSAL & Window(6, 0), "score": Softcap(2.0) >> Alibi(SLOPES)},
        {"window": 7},
    ),
    "not the first": ({"mask": CAUSAL & ~Prefix(2), "score": Alibi(SLOPES)}, {}),
    "lengths": ({"mask": CAUSAL & Lengths(np.asarray([4, 31, 17]))}, {}),
}


@pytest.mark.parametrize("kind", with_nightly(KINDS, commit=4))
def test_every_cut_is_the_whole(kind):
    how, made = KINDS[kind]
    x = tokens()
    whole, step = cuts.whole(x, **how), jitted(**how)
    for cut in CUTS:
        o, cache = stepped(x, empty(**made), cut, step=step)
        assert same(o, whole), cut
        assert cache.check().length.tolist() == [T] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["static", "first tokens and spare", "alibi in a ring"])
def test_every_cut_is_the_whole_operation_by_operation(kind):
    how, made = KINDS[kind]
    x = tokens()
    o, cache = stepped(x, empty(**made), (14, 14, 1, 1, 1), step=partial(attend_cached, **how))
    assert same(o, cuts.whole(x, **how))
    assert cache.check().length.tolist() == [T] * 3


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_any_batch_axes_decode_as_the_whole(batch):
    x, mask = tokens(batch), CAUSAL & Window(4, 0)
    whole, step = cuts.whole(x, mask=mask), jitted(mask=mask)
    for made in ({}, {"window": 5}):
        o, cache = stepped(x, empty(batch, 40, **made), (14, 1, 1, 1, 14), step=step)
        assert same(o, whole)
        assert cache.length.shape == batch


PADDED = ["paged", *(kind for kind in KINDS if kind != "lengths")]  # whose lengths differ by row


@pytest.mark.parametrize("kind", with_nightly(PADDED, commit=5))
def test_padding_may_stand_anywhere_and_hold_anything(kind):
    how, made = KINDS.get(kind, ({"mask": CAUSAL}, {}))
    valid = np.random.default_rng(1).random((3, T)) > 0.3
    valid[1, :9], valid[2, 20:] = False, False
    x = tokens()
    whole = without_padding(x, valid, **how)
    x = {name: np.where(valid[..., None, None], y, np.nan) for name, y in x.items()}
    step = jitted(**how)
    for cut in ((31,), (5, 14, 5, 1, 5, 1), (14, *(1,) * 17)):
        cache = paged() if kind == "paged" else empty(**made)
        o, cache = stepped(x, cache, cut, jnp.asarray(valid), step)
        assert same(o, whole), cut
        assert cache.length.tolist() == valid.sum(axis=1).tolist()


def test_pages_in_any_order():
    x = tokens()
    whole, step = cuts.whole(x, mask=CAUSAL), jitted(mask=CAUSAL)
    for cut in CUTS[:4]:
        o, cache = stepped(x, paged(), cut, step=step)
        assert same(o, whole), cut
        assert cache.length.tolist() == [T] * 3


@pytest.mark.nightly
def test_gradients_go_through_the_new_tokens_and_the_cache():
    x = tokens(length=14)
    weight = np.random.default_rng(5).normal(size=(3, 14, N, h))

    def by_steps(x):
        o, _ = stepped(x, empty(), (9, 5), mask=CAUSAL)
        return jnp.sum(o * weight)

    one = jax.jit(jax.grad(by_steps))(x)

    def at_once(x):
        return jnp.sum(attend(x["q"], x["k"], x["v"], mask=CAUSAL) * weight)

    two = jax.jit(jax.grad(at_once))(x)
    for name in "qkv":
        assert same(one[name], two[name]), name


@pytest.mark.nightly
def test_without_a_mask_all_that_is_stored_is_seen():
    x = tokens()
    o, _ = stepped(x, empty(), (14, 14, 1, 1, 1), mask=None)
    for at in (14, 28, 31):
        part = {name: y[:, :at] for name, y in x.items()}
        assert same(o[:, at - 1], cuts.whole(part, mask=FULL)[:, -1])
