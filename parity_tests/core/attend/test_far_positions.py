"""Positions and document ids up to the end of int32, and the errors beyond it."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Alibi,
    Causal,
    Chunked,
    Lengths,
    Mask,
    Prefix,
    ScoreFn,
    Segments,
    T5Bias,
    Window,
    attend,
    attention_weights,
)
from flax_attn._internal.arrays import INT32_MAX
from flax_attn._internal.types import Sizes
from flax_attn.masks.at_positions import at_positions
from flax_attn.masks.ranges import Rows, fully_visible_range, visible_range
from flax_attn.parity import judge
from flax_attn.places import Positions

pytestmark = pytest.mark.nightly

B, T, N, H = 2, 9, 2, 4
BASES = (2**28, 2**30 - 5, INT32_MAX - T + 1)  # of which the last ends with int32
STEPS = np.asarray([0, 8, 3, 1, 7, 2, 6, 5, 4])  # in no order, as a cache holds its tokens
OFFSETS = np.asarray([3, -2], np.int32)  # one a batch entry


def drawn():
    return [jax.random.normal(jax.random.key(i), (B, T, N, H)) for i in range(3)]


def _within(left, right, offset=0):
    offset = np.asarray(offset, np.int64).reshape(-1, 1, 1, 1)
    return lambda q, k, at: (k - q >= offset - left) & (k - q <= offset + right)


# What it hides, by whole numbers without an end; `at` is a number among the positions.
MASKS = {
    "causal": (lambda at: CAUSAL, _within(2**40, 0)),
    "ahead": (lambda at: Causal(2), _within(2**40, 2)),
    "behind": (lambda at: Causal(-3), _within(2**40, -3)),
    "of entries": (lambda at: Causal(jnp.asarray(OFFSETS)), _within(2**40, 0, OFFSETS)),
    "window": (lambda at: Window(3, 1), _within(3, 1)),
    "moved window": (lambda at: Window(2, 0, jnp.asarray(OFFSETS)), _within(2, 0, OFFSETS)),
    "not the window": (lambda at: ~Window(1, 1), lambda q, k, at: abs(k - q) > 1),
    "chunks": (
        lambda at: Chunked(2**28 + 3),
        lambda q, k, at: q // (2**28 + 3) == k // (2**28 + 3),
    ),
    "prefix": (lambda at: Prefix(at), lambda q, k, at: (k < at) & (q == q)),
    "or": (lambda at: Causal(-1) | Prefix(at), lambda q, k, at: (k < q) | (k < at)),
    "lengths": (
        lambda at: CAUSAL & Lengths(at, q=at + jnp.asarray([2, 0])),
        lambda q, k, at: (k <= q) & (k < at) & (q < at + np.reshape([2, 0], (2, 1, 1, 1))),
    ),
    "segments": (
        lambda at: Segments(at + jnp.arange(T) // 4 - 1),
        lambda q, k, at: np.equal.outer(np.arange(T) // 4, np.arange(T) // 4),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_at_positions_up_to_the_end_of_int32(name):
    make, says = MASKS[name]
    calls = [
        jax.jit(lambda at, by, b=b: attend(*drawn(), mask=make(by), **both(at), backend=b))
        for b in ("reference", "blockwise")
    ]
    for base in BASES:
        at, by = base + STEPS, base + 5
        seen = np.broadcast_to(says(at[:, None], at, by), (B, 1, T, T))
        want = attend(*drawn(), mask=jnp.asarray(seen), backend="reference")
        for call in calls:
            assert judge.allclose(call(jnp.asarray(at), jnp.asarray(by)), want), base
        _check_ranges(make(jnp.asarray(by)), at, seen)


def both(at):
    return {"q_positions": at, "kv_positions": at}


def _check_ranges(mask: Mask, at: np.ndarray, seen: np.ndarray):
    """Nothing is seen outside of the outer range of a block, and all inside of the inner one."""
    sizes = Sizes((B,), N, T, T)
    bound = at_positions(mask, Positions(at, at).bind(sizes)).bind(sizes)
    for b in range(B):
        for start in (0, 1, 4):
            rows, block = Rows(start, 3), seen[b, 0, start : start + 3]
            lo, hi = visible_range(bound, b, rows, sizes)
            assert not block[:, : int(lo)].any() and not block[:, int(hi) :].any()
            lo, hi = fully_visible_range(bound, b, rows, sizes)
            assert block[:, int(lo) : int(hi)].all()


@pytest.mark.parametrize("offset", [0, 4, -4, jnp.asarray(OFFSETS)], ids=str)
def test_scores_by_distance_are_those_of_small_positions(offset):
    table = jax.random.normal(jax.random.key(3), (32, N))
    for score in (Alibi(jnp.asarray([0.5, 0.25]), offset), T5Bias(table, offset=offset)):
        call = jax.jit(lambda at, score=score: attend(*drawn(), score=score, **both(at)))
        want = call(jnp.asarray(STEPS))
        for base in BASES:
            assert judge.allclose(call(jnp.asarray(base + STEPS)), want)


CALLS = {
    "positions": lambda x: attend(*drawn(), **both(x)),
    "positions of keys": lambda x: attention_weights(*drawn()[:2], kv_positions=x),
    "ids": lambda x: attend(*drawn(), mask=Segments(x)),
    "ids within": lambda x: attend(*drawn(), mask=CAUSAL | ~Segments(x), return_lse=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_beyond_int32_raises_or_is_nan(name):
    call, far = CALLS[name], jnp.asarray([INT32_MAX] * 4 + [INT32_MAX + 1] * 5, jnp.uint32)
    with pytest.raises(ValueError, match="int32; got 2147483648"):
        call(far)
    jitted = jax.jit(call)
    assert all(jnp.isnan(x).all() for x in jax.tree.leaves(jitted(far)))
    for got, want in zip(*map(jax.tree.leaves, (jitted(far - 1), call(far - 1))), strict=True):
        assert judge.allclose(got, want)


def test_wide_ids_are_compared_where_x64_is_enabled():
    with jax.enable_x64(True):
        ids = jnp.asarray([5] * 4 + [5 + 2**32] * 5)
        got = jax.jit(CALLS["ids"])(ids)
        assert judge.allclose(got, CALLS["ids"](jnp.asarray([5] * 4 + [6] * 5)))
        assert jnp.isnan(jax.jit(CALLS["ids"])(~ids.astype("uint64"))).all()


def test_positions_far_below_zero_are_absent():
    at = np.asarray([-(2**40), 0, 1, 2, 3, 4, 5, 6, 7])
    want = attend(*drawn(), **both(np.maximum(at, -1)))
    assert judge.allclose(attend(*drawn(), **both(at)), want)


FAR_OFFSETS = (-(2**33), -(2**31) - 1, -(2**31), -INT32_MAX, -5, 0, INT32_MAX, INT32_MAX + 1, 2**33)
FAR_COUNTS = (None, 0, 3, INT32_MAX, INT32_MAX + 1, 2**34)
LAST = np.asarray([0, 1, 5, INT32_MAX - 1, INT32_MAX])


@pytest.mark.parametrize("offset", FAR_OFFSETS)
def test_offsets_and_counts_of_any_size_are_those_of_whole_numbers(offset):
    """Known as numbers, and as arrays where int32 holds them."""
    q, k = LAST.astype(object)[:, None], LAST.astype(object)
    queries, keys = (jnp.asarray(x, jnp.int32) for x in (LAST[:, None], LAST[None]))
    kinds = [
        offset,
        *([np.asarray([offset], np.int32)] if -INT32_MAX - 1 <= offset <= INT32_MAX else []),
    ]
    for left, right, at in product(FAR_COUNTS, FAR_COUNTS, kinds):
        want = np.ones((len(LAST), len(LAST)), bool)
        want &= left is None or (k >= q + offset - left).astype(bool)
        want &= right is None or (k <= q + offset + right).astype(bool)
        mask = Window(left, right, at).bind(Sizes((1,), 1, 5, 5))
        assert np.array_equal(np.broadcast_to(mask(0, 0, queries, keys), want.shape), want)
        causal = Causal(at).bind(Sizes((1,), 1, 5, 5))(0, 0, queries, keys)
        assert np.array_equal(np.asarray(causal), (k <= q + offset).astype(bool))


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_query_that_is_absent_has_no_mean(backend):
    x = jnp.asarray([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    o = attend(x, x, x, q_positions=jnp.asarray([-1, 0, 1]), empty="mean", backend=backend)
    assert not o[0].any() and o[1:].all()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_sink_that_is_infinite(backend):
    x = jnp.asarray([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    none, lowest, highest = (
        attend(x, x, x, sinks=sinks, backend=backend)
        for sinks in (None, jnp.asarray([-jnp.inf]), jnp.asarray([jnp.inf]))
    )
    assert judge.allclose(np.asarray(lowest), np.asarray(none)) and jnp.isnan(highest).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_score_that_is_finite_where_it_is_hidden_has_finite_gradients(backend):
    x = jnp.asarray(np.random.RandomState(0).standard_normal((5, 1, 2)), "float32")

    def slope(by, least):
        far = ScoreFn(lambda by, s, b, n, q, k: s - by * jnp.log(jnp.maximum(q - k, least)), by)
        return attend(x, x, x, mask=Window(None, 0, -1), score=far, backend=backend).sum()

    (hidden, finite) = (jax.grad(slope)(jnp.float32(0.5), least) for least in (-1.0, 1.0))
    assert jnp.isnan(hidden) and jnp.isfinite(finite) and finite != 0
