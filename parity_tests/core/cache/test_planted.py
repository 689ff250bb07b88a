"""Faults planted in the caches of this library: `compare(decode=...)` finds, places and names each.

What is quantized is no part of it, since its steps are not those of a full forward pass.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from parity_tests.tables import with_nightly

pytest.importorskip("torch", reason="the harness compares with torch")

import torch
from flax import nnx

import torch_ref
from flax_attn import CAUSAL, GroupedQueryAttention, LatentAttention, Prefix, Rotary, Window
from flax_attn.cache import Cache, PagedCache, slots
from flax_attn.parity import Decode, compare
from torch_ref.grouped_query import Rotary as TorchRotary

T, W, D = 7, 3, 10
X = np.random.RandomState(0).standard_normal((3, T, D))
PADDED = np.ones((3, T), bool)
PADDED[1, :2] = PADDED[2, 5:] = False
SIZES = {"in_features": D, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
LATENT = {"in_features": D, "num_heads": 2, "kv_rank": 6, "nope_dim": 6, "rotary_dim": 4}
LATENT |= {"value_dim": 5}
SEEN = np.tri(T, dtype=bool) & ~np.tri(T, k=-W, dtype=bool)
FIRST = np.tri(T, dtype=bool) & (SEEN | (np.arange(T) < 1))
SECOND = "step 2 of 2x3+1, token 3"


class Two(nnx.Module):
    """Two layers, each with a cache of its own; or with that of the first."""

    def __init__(self, shared):
        self.a, self.b = (GroupedQueryAttention(**SIZES, rngs=nnx.Rngs(i)) for i in range(2))
        self.shared = shared

    def init_cache(self, batch, length):
        return tuple(layer.init_cache(batch, length) for layer in (self.a, self.b))

    def __call__(self, x, cache=None):
        if cache is None:
            return self.b(self.a(x))
        y, first = self.a(x, cache=cache[0])
        y, second = self.b(y, cache=cache[0] if self.shared else cache[1])
        return y, (first, second)


class TorchTwo(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch_ref.GroupedQueryAttention(**SIZES) for _ in range(2))

    def forward(self, x):
        return self.b(self.a(x))


def grouped(mask=CAUSAL, seen=None):
    """Grouped queries with a rotary, on both sides."""
    seen = {} if seen is None else {"mask": torch.from_numpy(seen)}
    theirs = torch_ref.GroupedQueryAttention(**SIZES, rotary=TorchRotary(), **seen)
    mine = GroupedQueryAttention(**SIZES, rotary=Rotary(), mask=mask, rngs=nnx.Rngs(0))
    return theirs, mine


def windowed():
    return grouped(CAUSAL & Window(W - 1, 0), SEEN)


def kept():
    return grouped(CAUSAL & (Window(W - 1, 0) | Prefix(1)), FIRST)


def latent():
    theirs = torch_ref.LatentAttention(**LATENT, rotary=TorchRotary())
    return theirs, LatentAttention(**LATENT, rotary=Rotary(), rngs=nnx.Rngs(0))


def two(shared=False):
    return TorchTwo(), Two(shared)


def made(**options):
    """A step whose cache is made with these options."""

    def step(layer, x, cache, **kwargs):
        cache = layer.init_cache(len(x), T, **options) if cache is None else cache
        return layer(x, cache=cache, **kwargs)

    return step


def with_drafts(spare):
    """On a ring, with room for them or without, two tokens after each step are taken back."""

    def step(layer, x, cache):
        cache = layer.init_cache(len(x), 9, window=W, spare=spare) if cache is None else cache
        y, cache = layer(x, cache=cache)
        _, drafts = layer(jnp.ones((len(x), 2, D)), cache=cache)
        return y, drafts.truncate(cache.length)

    return step


def after_another(layer, x, cache):
    """The rows held other sequences before."""
    if cache is None:
        cache = layer.init_cache(len(x), 9, window=W, keep_first=1)
        _, cache = layer(jnp.ones((len(x), 2, D)), cache=cache)
        cache = cache.reset(jnp.ones(len(x), bool))
    return layer(x, cache=cache)


def inserted(layer, x, cache):
    """Each row's prefill is a cache of its own."""
    if cache is not None:
        return layer(x, cache=cache)
    cache, rows = layer.init_cache(len(x), T), []
    for row in range(len(x)):
        y, one = layer(x[row : row + 1], cache=layer.init_cache(1, T))
        cache, rows = cache.insert(row, one), [*rows, y]
    return jnp.concatenate(rows), cache


def paged(layer, x, cache, **kwargs):
    """Each row has four pages of two tokens."""
    if cache is None:
        cache = layer.init_cache(len(x), T, pages=(12, 2))
        cache = replace(cache, table=jnp.arange(12, dtype=jnp.int32).reshape(3, 4))
    return layer(x, cache=cache, **kwargs)


def report(pair, flax=None, padded=False):
    kwargs = {"valid": PADDED} if padded else {}
    axes = {"0": -2, "valid": -1} if padded else None
    decode = Decode(cuts=[(3, 3, 1), (3, 1, 1, 1, 1)], flax=flax, axes=axes)
    once = {"dtypes": ("float64",), "eager": False, "grads": False}
    return compare(*pair, X, kwargs=kwargs, decode=decode, **once)


RIGHT = [
    (windowed, with_drafts(2), False),
    (kept, after_another, False),
    (grouped, inserted, False),
    (grouped, paged, True),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("pair", "flax", "padded"), with_nightly(RIGHT, commit=4))
def test_unchanged_caches_pass_the_comparison(pair, flax, padded):
    found = report(pair(), flax, padded)
    assert found.ok, str(found)


def without_first(self, places, new):
    gone = (places < 0) | (places < new[..., None] - self.slots)
    return jnp.where(gone, self.slots, places % self.slots)


def inverted(length, T, valid, right=slots.next_positions):
    return right(length, T, None if valid is None else ~valid)


def overwritten(self, length):
    """Without asking whether the ring still holds what the drafts have overwritten."""
    kept = self.positions < length[..., None]
    return replace(self, length=length, positions=jnp.where(kept, self.positions, -1))


def length_kept(self, rows, right=Cache.reset):
    return replace(right(self, rows), length=self.length)


def into_the_next(self, row, other, right=Cache.insert):
    return right(self, (row + 1) % len(self.length), other)


def page_late(self, places, right=PagedCache._pages_of):
    return right(self, jnp.where(places < 0, places, places + 1))


def transposed(self, plain, turned, latent, shared, right=LatentAttention._absorbed):
    q, k, v = right(self, plain, turned, latent, shared)
    _, to_key = self._with_kernel(plain, slice(0, self.nope_dim))
    inner = jnp.einsum("...nm,mnl->...nl", plain, to_key)
    return jnp.concatenate([inner, q[..., inner.shape[-1] :]], axis=-1), k, v


FAULTS = {
    "ring without its first tokens": (
        *(Cache, "_slots_of", without_first, kept, made(window=W, keep_first=1), False),
        *("token", "does not see token 0"),
    ),
    "valid inverted": (
        *(slots, "next_positions", inverted, grouped, made(), True),
        *("step 1 of 2x3+1, token 0", "does not see itself: the cache is read before"),
    ),
    "overwritten drafts": (
        *(Cache, "truncate", overwritten, windowed, with_drafts(0), False),
        *(SECOND, "does not see token 1: overwritten"),
    ),
    "reset keeps length": (
        *(Cache, "reset", length_kept, kept, after_another, False),
        *("token", "does not see token 0"),
    ),
    "insert into the wrong row": (
        *(Cache, "insert", into_the_next, grouped, inserted, False),
        *(SECOND, "depends on row"),
    ),
    "page off by one": (
        *(PagedCache, "_pages_of", page_late, grouped, paged, False),
        *("step 1 of 2x3+1, token 1", "themselves not stored"),
    ),
    "absorbed product transposed": (
        *(LatentAttention, "_absorbed", transposed, latent, None, False),
        *("step 1 of 2x3+1, token 1", "already from an empty cache"),
    ),
}


EACH = [  # of every way to make a cache
    "ring without its first tokens",
    "overwritten drafts",
    "insert into the wrong row",
    "page off by one",
]


@pytest.mark.nightly(but=["page off by one"])
@pytest.mark.parametrize("name", with_nightly(FAULTS, commit=EACH))
def test_a_planted_fault_is_found_placed_and_named(name, monkeypatch):
    where, part, wrong, pair, flax, padded, place, hint = FAULTS[name]
    monkeypatch.setattr(where, part, wrong)
    found = report(pair(), flax, padded)
    print(found)
    assert {row.kind for row in found.failed} == {"decode"}, str(found)
    assert found.first.kind == "decode" and place in found.first.tap
    assert hint in found.first.hint, found.first.hint


@pytest.mark.nightly
def test_the_cache_of_another_layer_is_found_placed_and_named():
    found = report(two(shared=True))
    print(found)
    assert SECOND in found.first.tap and "the cache of another layer" in found.first.hint
