"""Whatever is done to a cache, each row is what it is alone: sequences drawn with a seed.

`Told` says in plain Python what every call stores and refuses. Outputs are computed from that by
the formula, in numpy, for each query by itself.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Chunked, Documents, MaskFn, Prefix, Window, attend_cached
from flax_attn.cache import PagedCache
from flax_attn.parity import judge
from flax_attn.where import assume_platform
from parity_tests.core.backends import flash
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.pages.kernels import tokamax_is_there
from parity_tests.tables import with_nightly

from . import cuts
from .cuts import H, K, N, empty, h
from .told import ENDS, PAGE, PAGES, ROWS, SLOTS, Told

pytestmark = pytest.mark.usefixtures("float64")

KINDS = {  # the mask, what it shows, and how the cache is made
    "static": (CAUSAL, lambda q, k: k <= q, {}),
    "prefix": (CAUSAL | Prefix(3), lambda q, k: (k <= q) | (k < 3), {}),
    "chunks": (Chunked(4), lambda q, k: k // 4 == q // 4, {}),
    "to both sides": (
        CAUSAL | (Window(1, 1) & Chunked(2)),
        lambda q, k: (k <= q) | ((k == q + 1) & (k // 2 == q // 2)),
        {},
    ),
    "documents": (
        CAUSAL & Documents([ENDS[0], *np.diff(ENDS)]),
        lambda q, k: (k <= q) & (np.digitize(k, ENDS) == np.digitize(q, ENDS)) & (q < ENDS[-1]),
        {},
    ),
    "ring": (CAUSAL & Window(3, 0), lambda q, k: (k <= q) & (k > q - 4), {"window": 4, "spare": 2}),
    "first tokens kept": (
        CAUSAL & (Window(3, 0) | Prefix(2)),
        lambda q, k: (k <= q) & ((k > q - 4) | (k < 2)),
        {"window": 4, "spare": 2, "keep_first": 2},
    ),
    "window": (CAUSAL & Window(3, 0), lambda q, k: (k <= q) & (k > q - 4), {}),
    "paged": (CAUSAL, lambda q, k: k <= q, {"pages": True}),
    "paged, a function": (
        MaskFn(lambda b, n, q, k: (k <= q) & ((q - k) % 3 < 2)),
        lambda q, k: (k <= q) & ((q - k) % 3 < 2),
        {"pages": True},
    ),
}


def made(rows, how):
    if "pages" not in how:
        return empty((rows,), SLOTS, **how)
    return PagedCache.empty(rows, SLOTS, K, (PAGES, PAGE), H, h, dtype=jnp.float64)


def formula(q, tokens, at, shows):
    """The attention of one query at position `at` over these keys and values."""
    k, v = (np.repeat(np.stack(x), N // K, axis=1) for x in zip(*tokens, strict=True))  # S N ...
    hidden = ~shows(at, np.arange(len(k)))
    if hidden.all():
        return np.zeros((N, h))
    scores = np.where(hidden[:, None], -np.inf, np.einsum("nh,snh->sn", q, k) / H**0.5)
    weights = np.exp(scores - scores.max(0))
    return np.einsum("sn,snh->nh", weights / weights.sum(0), v)


METHODS = {
    "copy_page": jax.jit(lambda cache, row, at, page: cache.copy_page(row, at, page)),
    "truncate": jax.jit(lambda cache, lengths: cache.truncate(lengths)),
    "take": jax.jit(lambda cache, rows, *pages: cache.take(rows, *pages)),
    "reset": jax.jit(lambda cache, rows: cache.reset(rows)),
    "insert": jax.jit(lambda cache, row, other: cache.insert(row, other)),
}
STORED = jax.jit(lambda q, k, v, c: attend_cached(q, k, v, c, mask=CAUSAL & Window(3, 0)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", with_nightly([range(40), range(40, 640)], commit=[range(40)]))
def test_each_row_is_what_it_is_alone(kind, seeds):
    check_rows(kind, seeds)


DEVICES = {"H100": ("gpu", (9, 0)), "A100": ("gpu", (8, 0)), "TPU": ("tpu", None)}
BY_KERNELS = [(kind, device) for kind in KINDS for device in DEVICES]
COMMIT = [("documents", "H100"), ("paged", "A100")]


@pytest.mark.parametrize(("kind", "device"), with_nightly(BY_KERNELS, commit=COMMIT))
def test_each_row_is_what_it_is_alone_by_kernels(monkeypatch, kind, device):
    """The kernels of the device are simulated here."""
    flash.stand_ins(monkeypatch)
    for module in (cuts, sys.modules[__name__]):
        monkeypatch.setattr(module, "H", 8)  # a width that cuDNN takes, for values too
        monkeypatch.setattr(module, "h", 8)
    with assume_platform(*DEVICES[device]), tokamax_is_there():
        check_rows(kind, range(700, 740))


def check_rows(kind, seeds):
    mask, shows, how = KINDS[kind]
    step = jax.jit(lambda q, k, v, c, valid: attend_cached(q, k, v, c, mask=mask, valid=valid))
    computed = refused = 0
    for seed in seeds:
        random, told = np.random.default_rng(seed), Told(how, shows)
        cache = made(ROWS, how)
        for _ in range(9):
            cache = changed(cache, told, random, how)
            cache = spoiled(cache, told) if random.random() < 0.3 else cache
            T = int(random.choice([1, 4]))
            q, k, v = (random.normal(size=(ROWS, T, *w)) for w in ((N, H), (K, H), (K, h)))
            if random.random() < 0.3:  # a token that several rows have
                k, v = (np.repeat(x[:1], ROWS, axis=0) for x in (k, v))
            valid = (random.random((ROWS, T)) < 0.7) | (random.random() < 0.6)
            valid = valid if random.random() < 0.02 else told.up_to_what_is_shown(valid)
            cache = prepared(cache, told, valid, random)
            places, unknown = told.append(k, v, valid)
            o, cache = step(q, k, v, cache, valid)
            assert np.asarray(cache.length).tolist() == [len(row) for row in told.rows], seed
            assert np.asarray(cache.overflowed).tolist() == told.over, seed
            o, known, want = np.asarray(o), ~np.asarray(unknown), np.zeros(o.shape)
            for row in np.flatnonzero(known):
                for t, at in enumerate(places[row]):
                    if at >= 0:
                        want[row, t] = formula(q[row, t], told.rows[row], at, shows)
            assert judge.allclose(o[known], want[known]) and np.isnan(o[~known]).all(), seed
            refused += (~known & valid.any(1)).sum()
            computed += (known & valid.any(1)).sum()
    print(f"{kind}: {computed} rows of calls computed, {refused} refused")
    assert refused < 0.05 * (computed + refused)


def prepared(cache, told, valid, random):
    """What a caller of a paged cache does before a call: pages, and copies of shared ones."""
    if told.table is None:
        return cache
    careful = random.random() < 0.8
    for row, at in told.to_be_written(valid):
        page = told.table[row][at]
        if page < 0 and told.free():
            told.table[row][at] = told.free()[0]
        elif page >= 0 and careful and told.names(page) > 1 and told.free():
            cache, free = with_table(cache, told), told.free()[0]
            told.copy_page(row, at, free)
            cache = METHODS["copy_page"](cache, row, at, free)
    return with_table(cache, told)


def with_table(cache, told):
    """The cache with the table that its caller has made, if it has one."""
    if told.table is None:
        return cache
    return replace(cache, table=jnp.asarray(told.table, jnp.int32))


def spoiled(cache, told):
    """The cache with NaN in every slot that no row holds."""
    if told.table is None:
        names, is_free = ("keys", "values"), np.asarray(cache.positions) < 0
    else:
        names, is_free = ("pool_keys", "pool_values"), np.ones((PAGES, PAGE), bool)
        for slot in told.held():
            is_free[slot] = False
    arrays = {name: np.array(getattr(cache, name)) for name in names}
    for x in arrays.values():
        np.swapaxes(x, 1, 2)[is_free] = np.nan
    return replace(cache, **arrays)


def changed(cache, told, random, how):
    """One of the methods, or none; rows that are full or have overflowed are emptied."""
    full = np.asarray([len(row) > SLOTS - 4 for row in told.rows]) | told.over
    choice = random.choice(["reset", "truncate", "take", "insert", "none"])
    if full.any() or choice == "reset":
        rows = full | (random.random(ROWS) < 0.2)
        told.reset(rows, pages=random.random() < 0.3)
        cache = METHODS["reset"](cache, rows)
    elif choice == "truncate":
        lengths = np.asarray([len(row) for row in told.rows]) - random.integers(0, 3, ROWS)
        lengths = np.maximum(lengths, 0).astype(np.int32)
        told.truncate(lengths)
        cache = METHODS["truncate"](cache, lengths)
    elif choice == "take":
        rows = random.integers(0, ROWS, ROWS).astype(np.int32)
        shares = told.table is not None and random.random() < 0.8
        pages = (told.take_pages(rows),) if shares else ()
        told.take(rows, *pages)
        cache = METHODS["take"](cache, rows, *pages)
    elif choice == "insert":
        k, v = random.normal(size=(1, 3, K, H)), random.normal(size=(1, 3, K, h))
        q, row = random.normal(size=(1, 3, N, H)), int(random.integers(ROWS))
        one = empty((1,), SLOTS, **({} if told.table is not None else how))
        _, one = STORED(q, k, v, one)
        told.insert(row, k[0], v[0], pages=random.random() < 0.3)
        cache = METHODS["insert"](with_table(cache, told), row, one)
    return with_table(cache, told)
