"""Masks against loops: elementwise, as grids, for blocks of queries; hashed by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn import (
    CAUSAL,
    FULL,
    Causal,
    Chunked,
    Dense,
    Lengths,
    MaskFn,
    Prefix,
    Segments,
    Window,
    attend,
)
from flax_attn._internal.types import Sizes
from flax_attn.masks import Rows, as_mask
from flax_attn.masks.ranges import visible_range
from parity_tests.tables import with_nightly

B, N = 2, 3
SHAPES = [(4, 7), (6, 6), (7, 4)]
QUICK = settings(max_examples=20, derandomize=True, deadline=None)


def even(b, n, q, k):
    return (b + n + q + k) % 2 == 0


def numbers(seed, *shape, below):
    return np.random.RandomState(seed).randint(0, below, shape)


def leaf(kind, a, b, T, S):
    """A mask and what it says of one place, by plain Python."""
    end = S - T
    kv, ids = numbers(a, B, below=S + 2), (numbers(b, B, T, below=3), numbers(a, B, S, below=3))
    dense = numbers(a + b, N, T, S, below=2) > 0
    return {
        "full": (FULL, lambda i, n, q, k: True),
        "causal": (Causal(a - 3), lambda i, n, q, k: k <= q + a - 3),
        "end": (Causal("end"), lambda i, n, q, k: k <= q + end),
        "window": (Window(a, b, -1), lambda i, n, q, k: q - 1 - a <= k <= q - 1 + b),
        "left": (Window(a, None, "end"), lambda i, n, q, k: q + end - a <= k),
        "chunked": (Chunked(a + 1), lambda i, n, q, k: q // (a + 1) == k // (a + 1)),
        "prefix": (Prefix(b), lambda i, n, q, k: k < b),
        "prefixes": (Prefix(kv), lambda i, n, q, k: k < kv[i]),
        "lengths": (Lengths(kv, q=kv[::-1].copy()), lambda i, n, q, k: k < kv[i] and q < kv[1 - i]),
        "segments": (
            Segments(q_ids=ids[0], kv_ids=ids[1]),
            lambda i, n, q, k: ids[0][i, q] == ids[1][i, k],
        ),
        "dense": (Dense(dense), lambda i, n, q, k: dense[n, q, k]),
        "fn": (MaskFn(even), even),
    }[kind]


KINDS = "full causal end window left chunked prefix prefixes lengths segments dense fn".split()
LEAVES = st.tuples(st.sampled_from(KINDS), st.integers(0, 5), st.integers(0, 5))
TREES = st.recursive(
    LEAVES,
    lambda t: st.tuples(st.sampled_from("&|"), t, t) | st.tuples(st.just("~"), t),
    max_leaves=4,
)


def built(tree, T, S):
    """A tree of masks, and its oracle."""
    if tree[0] == "~":
        mask, says = built(tree[1], T, S)
        return ~mask, lambda *place: not says(*place)
    if tree[0] in ("&", "|"):
        (one, first), (two, second) = built(tree[1], T, S), built(tree[2], T, S)
        if tree[0] == "&":
            return one & two, lambda *place: first(*place) and second(*place)
        return one | two, lambda *place: first(*place) or second(*place)
    return leaf(*tree, T, S)


@pytest.mark.nightly
@pytest.mark.parametrize(("T", "S"), with_nightly(SHAPES, commit=[(7, 4)]))
@QUICK
@given(tree=TREES)
def test_any_combination_agrees_with_loops(tree, T, S):
    sizes = Sizes((B,), N, T, S)
    mask, says = built(tree, T, S)
    want = np.asarray(
        [
            [[[says(b, n, q, k) for k in range(S)] for q in range(T)] for n in range(N)]
            for b in range(B)
        ]
    )
    bound = mask.bind(sizes)
    grid = np.broadcast_to(np.asarray(bound.grid(sizes)), want.shape)
    assert (grid == want).all()
    assert (np.broadcast_to(np.asarray(bound(*sizes.grid())), want.shape) == want).all()
    static = mask.static(sizes)
    assert static is None or (static == want).all()
    for b in range(B):
        for lo, hi in ((0, 2), (1, T), (2, 3)):
            first, last = (int(x) for x in visible_range(bound, b, Rows(lo, hi - lo), sizes))
            rows = want[b, :, lo:hi]
            assert not rows[..., :first].any() and not rows[..., max(last, 0) :].any()


@pytest.mark.nightly
def test_key_ranges_may_be_traced():
    sizes, kv = Sizes((2,), 1, 9, 9), np.asarray([4, 8])
    mask = (Window(3, 0) & Lengths(kv) & Chunked(5) | Prefix(np.asarray([1, 0]))).bind(sizes)
    traced = jax.jit(lambda b, lo: visible_range(mask, b, Rows(lo, 2), sizes))
    for b in range(2):
        for lo in range(8):
            plain = visible_range(mask, b, Rows(lo, 2), sizes)
            assert [int(x) for x in traced(b, lo)] == [int(x) for x in plain]


def test_static_masks_say_so():
    sizes = Sizes((2,), 3, 4, 7)
    static = [FULL, CAUSAL, Causal("end"), Window(1, None), Chunked(2), Prefix(3), ~CAUSAL]
    for mask in (*static, CAUSAL & Prefix(2), Window(1, 1) | ~Chunked(3)):
        assert mask.is_static and mask.static(sizes).shape == (4, 7)
    kv, place = np.asarray([1, 2]), Causal(jnp.asarray(1))
    dynamic = [
        Lengths(kv),
        Lengths(3),
        Prefix(kv),
        Segments(q_ids=np.arange(4), kv_ids=np.arange(7)),
        MaskFn(even),
    ]
    for mask in (
        *dynamic,
        place,
        Dense(np.ones((4, 7), bool)),
        CAUSAL & MaskFn(even),
        ~Lengths(kv),
    ):
        assert not mask.is_static and mask.static(sizes) is None


def test_ranges_skip_what_they_can():
    sizes = Sizes((), 1, 100, 100)
    assert Window(4, 0).key_range(0, 0, (50, 60), sizes) == (46, 60)
    assert visible_range(CAUSAL & Chunked(10), 0, Rows(20, 5), sizes) == (20, 25)
    assert visible_range(Window(2, 0) | Prefix(3), 0, Rows(50, 10), sizes) == (0, 60)
    assert CAUSAL.bind(sizes).key_range(0, 0, (0, 10), sizes) == (0, 10)


def test_equal_masks_are_equal_and_hash_alike():
    pairs = [
        (Causal(1) & ~Chunked(3), Causal(1) & ~Chunked(3), Causal(2) & ~Chunked(3)),
        (Dense(np.eye(3, dtype=bool)), Dense(np.eye(3, dtype=bool)), Dense(~np.eye(3, dtype=bool))),
        (Lengths(np.asarray([1, 2])), Lengths(np.asarray([1, 2])), Lengths(np.asarray([1, 3]))),
        (Window(1, None), Window(1, None), Causal(1)),
    ]
    for one, same, other in pairs:
        assert one == same and hash(one) == hash(same) and one != other
        assert len({one, same, other}) == 2


@pytest.mark.nightly
def test_equal_masks_do_not_trace_twice():
    traces = []

    @jax.jit
    def f(q, mask):
        traces.append(mask)
        return attend(q, q, q, mask=mask)

    q = jnp.ones((5, 1, 4))
    for offset in (0, 0, 1):
        for length in (3, 4):
            f(q, Causal(offset) & Lengths(np.asarray(length)))
    assert len(traces) == 2


def test_a_rebuilt_mask_keeps_its_structure_whatever_its_leaves():
    mask = Lengths(np.asarray([1, 2])) & ~Dense(np.ones((4, 4), bool)) & Window(1, None)
    leaves, structure = jax.tree.flatten(mask)
    assert len(leaves) == 2
    for stand_in in (0, 1.5, len, "spec", object()):
        assert jax.tree.structure(jax.tree.map(lambda x, y=stand_in: y, mask)) == structure
    assert jax.tree.unflatten(structure, leaves) == mask


@pytest.mark.nightly
def test_arrays_may_stand_on_either_side():
    allowed = np.random.RandomState(0).rand(4, 7) < 0.5
    sizes = Sizes((), 1, 4, 7)
    for array in (allowed, jnp.asarray(allowed)):
        for mask in (array & CAUSAL, CAUSAL & array):
            assert (mask.bind(sizes).grid(sizes)[0, 0] == (allowed & (np.tri(4, 7) > 0))).all()
        for mask in (array | CAUSAL, CAUSAL | array):
            assert (mask.bind(sizes).grid(sizes)[0, 0] == (allowed | (np.tri(4, 7) > 0))).all()


@pytest.mark.nightly
def test_masks_are_pytrees_for_vmap():
    q = jnp.asarray(np.random.RandomState(0).standard_normal((2, 5, 1, 4)), jnp.float32)
    lengths = jnp.asarray([2, 4])

    def call(q, mask):
        return attend(q, q, q, mask=mask)

    given = q, Lengths(lengths) & CAUSAL
    vmap_leading, batched = (np.asarray(jax.jit(f)(*given)) for f in (jax.vmap(call), call))
    assert (vmap_leading == batched).all()


@pytest.mark.nightly
def test_several_batch_axes():
    sizes = Sizes((2, 3), 1, 4, 5)
    kv = np.asarray([[1, 2, 3], [4, 5, 0]])
    grid = np.asarray(Lengths(kv).bind(sizes).grid(sizes)).reshape(2, 3, 5)
    assert (grid == (np.arange(5) < kv[..., None])).all()
    dense = np.random.RandomState(0).rand(3, 1, 4, 5) < 0.5
    bound = np.asarray(Dense(dense).bind(sizes).grid(sizes))
    assert (bound.reshape(2, 3, 1, 4, 5) == dense).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Window(-1, 0), r"Window\.left must be a count"),
        (lambda: Window(0, 1.5), r"Window\.right must be a count"),
        (lambda: Chunked(0), r"Chunked\.size must be a count"),
        (lambda: Causal("start"), "integer or \"end\"; got 'start'"),
        (lambda: Causal(1.5), 'integer or "end"; got 1.5'),
        (lambda: Causal(None), 'integer or "end"; got None'),
        (lambda: Window(1, 1, np.arange(5.0)), r"Window\.offset .*got array"),
        (
            lambda: Window(1, 1, np.arange(5)).bind(Sizes((2,), 1, 5, 5)),
            r"Window\.offset .*\(2,\).*\(5,\)",
        ),
        (lambda: Dense(np.ones((5, 6), bool)).bind(Sizes((), 1, 5, 5)), r"\(1, 5, 5\).*\(5, 6\)"),
        (lambda: Lengths(np.ones(3, int)).bind(Sizes((2,), 1, 5, 5)), r"\(2,\).*\(3,\)"),
        (
            lambda: Segments(np.ones(4, int)).bind(Sizes((), 1, 4, 5)),
            "got T=4 and S=5: say Segments",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lengths(2.5),
        lambda: Lengths(2, q=True),
        lambda: Prefix(np.ones(2)),
        lambda: Segments(np.ones(3)),
        lambda: as_mask(1.0),
        lambda: CAUSAL & np.ones((4, 4)),
        lambda: np.ones((4, 4)) | CAUSAL,
        lambda: MaskFn(lambda b, n, q, k: 1.0)(0, 0, 0, 0),
    ],
)
def test_other_types_are_refused(make):
    with pytest.raises(TypeError, match=r"integers|boolean"):
        make()
