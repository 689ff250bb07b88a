"""The laws of the ranges by which blocks are skipped or left unmasked, against mask tables."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn._internal.types import Sizes
from flax_attn.backends.blockwise.plan import (
    every_key_visible,
    static_fully_visible_range,
    static_visible_range,
)
from flax_attn.masks import (
    FULL,
    Causal,
    Chunked,
    Dense,
    Lengths,
    Mask,
    MaskFn,
    Prefix,
    Rows,
    Segments,
    Window,
)
from flax_attn.masks.ranges import fully_visible_range, visible_range
from parity_tests.requests.users_masks import answers_traced

from .law_cases import drawn_masks

SHAPES = (5, 7), (6, 4), (3, 3)


def runs(T):
    return [
        Rows(start, size) for size in (1, 2, 3, T) for start in range(T - size + 1) if size <= T
    ]


def table(mask, sizes):
    seen = mask.bind(sizes)(*sizes.grid())
    return np.broadcast_to(np.asarray(seen), (sizes.B, sizes.N, sizes.T, sizes.S))


def hull(seen):
    """From the first to the last True of a row, or None."""
    at = np.flatnonzero(seen)
    return (int(at[0]), int(at[-1]) + 1) if len(at) else None


def longest(seen):
    """The first of the longest runs of True in a row, or None."""
    found = [(lo, hi) for lo in range(len(seen)) for hi in range(lo + 1, len(seen) + 1)]
    found = [(lo, hi) for lo, hi in found if seen[lo:hi].all()]
    return max(found, key=lambda x: (x[1] - x[0], -x[0])) if found else None


def is_range(found, want, S):
    """Whether a range is the one wanted, and empty where none is; within the keys in any case."""
    lo, hi = found
    if not (0 <= lo <= S and 0 <= hi <= S):
        return False
    return lo >= hi if want is None else (lo, hi) == want


SIMPLE = {
    "full": FULL,
    "causal": Causal(),
    "causal ahead": Causal(2),
    "causal behind": Causal(-2),
    "causal at the end": Causal("end"),
    "causal far": Causal(40),
    "causal nowhere": Causal(-40),
    "window": Window(1, 1),
    "left window": Window(2, 0),
    "right window": Window(0, 2, 1),
    "no left end": Window(None, 1, -1),
    "no right end": Window(1, None, 1),
    "no ends": Window(None, None),
    "wide window": Window(3, 4),
    "window past the keys": Window(1, 1, 9),
    "window before the keys": Window(1, 1, -9),
    "chunks": Chunked(2),
    "chunks of three": Chunked(3),
    "one chunk": Chunked(9),
    "single places": Chunked(1),
    "prefix": Prefix(2),
    "no prefix": Prefix(0),
    "negative prefix": Prefix(-3),
    "long prefix": Prefix(99),
}


def test_simple_masks_have_the_narrowest_and_the_widest_range_there_is():
    for T, S in SHAPES:
        sizes = Sizes((1,), 1, T, S)
        for name, mask in SIMPLE.items():
            seen, mask = table(mask, sizes)[0, 0], mask.bind(sizes)
            for rows in runs(T):
                part = seen[slice(*rows)]
                found = (
                    visible_range(mask, 0, rows, sizes),
                    fully_visible_range(mask, 0, rows, sizes),
                )
                assert all(type(n) is int and 0 <= n <= S for pair in found for n in pair)
                assert is_range(found[0], hull(part.any(0)), S), (name, rows)
                assert is_range(found[1], longest(part.all(0)), S), (name, rows)
                # What one query sees is one run: its complement is known as well.
                if rows.size == 1:
                    wanted = hull(~part[0]), longest(~part[0])
                    for get, want in zip((visible_range, fully_visible_range), wanted, strict=True):
                        found = get(~mask, 0, rows, sizes)
                        assert all(type(n) is int for n in found)
                        assert is_range(found, want, S), (name, rows)
                    found, want = visible_range(~~mask, 0, rows, sizes), hull(part[0])
                    assert is_range(found, want, S) or want not in ((0, S), None), name


def test_pairs_of_simple_masks():
    """`&` meets, `|` spans; of what both show to all of `|` the longer, of equals the first."""
    sizes = Sizes((1,), 1, 5, 6)
    masks = {name: mask.bind(sizes) for name, mask in SIMPLE.items()}
    seen = {name: table(mask, sizes)[0, 0] for name, mask in SIMPLE.items()}
    for one, a in masks.items():
        for two, b in masks.items():
            for rows in (Rows(1, 1), Rows(2, 2)):
                x, y = (seen[name][slice(*rows)] for name in (one, two))
                both, either = a & b, a | b
                if rows.size == 1:
                    met = visible_range(both, 0, rows, sizes)
                    assert is_range(met, hull(x[0] & y[0]), 6), (one, two)
                found = visible_range(either, 0, rows, sizes)
                assert is_range(found, hull((x | y).any(0)), 6), (one, two)
                found = fully_visible_range(both, 0, rows, sizes)
                assert is_range(found, longest((x & y).all(0)), 6), (one, two)
                all_of = [longest(z.all(0)) for z in (x, y)]
                want = max(filter(None, all_of), key=lambda z: z[1] - z[0], default=None)
                assert is_range(fully_visible_range(either, 0, rows, sizes), want, 6), (one, two)


def test_entries_have_offsets_and_lengths_of_their_own():
    T, S = 5, 7
    sizes = Sizes((4,), 1, T, S)
    offsets, counts = np.asarray([0, 3, -9, 9]), np.asarray([3, 9, 0, 5])
    queries = np.asarray([5, 2, 4, 0])
    for mask in (
        Causal(offsets),
        Window(1, 2, offsets),
        Window(None, 0, offsets),
        Window(0, None, offsets),
        Prefix(counts),
        Lengths(counts),
        Lengths(counts, q=queries),
        Lengths(np.asarray([-2, 4, 8, 7]), q=queries),
    ):
        seen, mask = table(mask, sizes)[:, 0], mask.bind(sizes)
        assert not mask.is_static
        for rows in runs(T):
            for b in range(4):
                part = seen[b, slice(*rows)]
                for get, want in (
                    (visible_range, hull(part.any(0))),
                    (fully_visible_range, longest(part.all(0))),
                ):
                    found = tuple(map(int, get(mask, b, rows, sizes)))
                    assert is_range(found, want, S), (mask, rows, b)


def test_documents_are_found_whole():
    """Ids in order, with a gap, apart, and none at all; of one document the run is inside too."""
    T, S = 5, 7
    sizes = Sizes((4,), 1, T, S)
    q_ids = np.asarray([[0, 0, 1, 1, 3], [2, 2, 2, 0, 1], [7, 7, 7, 7, 7], [1, 3, 3, 1, 1]])
    kv_ids = np.asarray(
        [[0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 2, 2, 2, 1], [1, 2, 3, 4, 5, 6, 8], [3, 1, 3, 1, 3, 3, 2]]
    )
    mask = Segments(q_ids=q_ids, kv_ids=kv_ids).bind(sizes)
    for rows in runs(T):
        for b in range(4):
            mine = q_ids[b, slice(*rows)]
            among = (kv_ids[b] >= mine.min()) & (kv_ids[b] <= mine.max())
            found = tuple(map(int, visible_range(mask, b, rows, sizes)))
            assert found == (hull(among) or (S, 0))
            lo, hi = hull(among) or (0, 0)
            whole = len(set(mine)) == 1 and among[lo:hi].all()
            found = tuple(map(int, fully_visible_range(mask, b, rows, sizes)))
            assert found == ((lo, hi) if whole else (0, 0))
    for x in (
        *visible_range(mask, 0, Rows(0, 2), sizes),
        *fully_visible_range(mask, 0, Rows(0, 2), sizes),
    ):
        assert x.dtype == jnp.int32


def test_what_is_hidden_outside_and_shown_inside_any_program():
    for mask, seen, sizes in drawn_masks(20, *SHAPES):
        for rows in runs(sizes.T)[:: 1 if mask.is_static else 3]:
            for b in range(1 if mask.is_static else sizes.B):
                part = seen[b, :, slice(*rows)]
                lo, hi = (int(n) for n in visible_range(mask, b, rows, sizes))
                some = part.any((0, 1))
                assert not some[: max(lo, 0)].any() and not some[max(hi, 0) :].any()
                lo, hi = (int(n) for n in fully_visible_range(mask, b, rows, sizes))
                assert lo >= hi or (lo >= 0 and hi <= sizes.S and part[:, :, lo:hi].all())


def test_traced_blocks_have_the_ranges_of_blocks_that_are_known():
    """They must be equal numbers: plans use known blocks and loops use traced ones."""
    drawn = [x for x in drawn_masks(5, (5, 7)) if answers_traced(x[0])]
    assert 4 * len(drawn) >= 3 * 5
    for mask, _, sizes in drawn:
        starts = np.arange(4)
        for get in (visible_range, fully_visible_range):

            def traced(b, start, get=get, mask=mask, sizes=sizes):
                found = get(mask, b, Rows(start, 2), sizes)
                return tuple(jnp.asarray(x, jnp.int32) for x in found)

            both = jax.jit(jax.vmap(jax.vmap(traced, (None, 0)), (0, None)))
            lo, hi = map(np.asarray, both(jnp.arange(2), jnp.asarray(starts, jnp.int32)))
            for b, start in ((0, 0), (0, 1), (0, 3)) if mask.is_static else ((0, 0), (1, 2)):
                found = get(mask, b, Rows(start, 2), sizes)
                assert (lo[b, start], hi[b, start]) == tuple(map(int, found))
                if mask.is_static:
                    assert all(type(n) is int for n in found)


def test_what_is_not_known_is_wide():
    sizes = Sizes((2,), 2, 5, 7)
    rows = Rows(1, 2)
    for mask in (Dense(np.ones((5, 7), bool)), MaskFn(lambda b, n, q, k: k >= 0)):
        bound = mask.bind(sizes)
        for either in (bound, ~bound):
            assert visible_range(either, 0, rows, sizes) == (0, 7)
            assert fully_visible_range(either, 0, rows, sizes) == (0, 0)
        assert static_visible_range(bound, rows, sizes) == (0, 7)
        assert static_fully_visible_range(bound, rows, sizes) == (0, 0)
    window, lengths = Window(1, 0), Lengths(np.asarray([2, 0])).bind(sizes)
    for mask in (window & lengths, lengths & window, lengths & (window & lengths)):
        assert static_visible_range(mask, rows, sizes) == (0, 3)
        assert static_fully_visible_range(mask, rows, sizes) == (0, 0)
    assert static_visible_range(Causal() & lengths & Window(0, None), rows, sizes) == (1, 3)
    assert static_visible_range(Window(0, None) & lengths & Causal(), rows, sizes) == (1, 3)
    assert static_visible_range(window | lengths, rows, sizes) == (0, 7)
    assert static_visible_range(window | FULL, rows, sizes) == (0, 7)
    assert static_visible_range(~window, Rows(0, 1), sizes) == (1, 7)
    assert static_fully_visible_range(~window, Rows(2, 1), sizes) == (3, 7)
    assert Rows(3, 2) == (3, 5)


def asked(kind, found):
    """A mask of that kind that is asked for its range, and remembers what it was asked."""

    class Asked(kind):
        is_static = True

        def key_range(self, b, n, q, sizes):
            found.append((b, n, q, sizes))
            return -3, 99

    return Asked


def test_masks_of_others_are_asked_for_the_first_head_and_kept_within_the_keys():
    sizes, found = Sizes((2,), 2, 5, 7), []
    own = asked(Mask, found)()
    assert visible_range(own, 1, Rows(2, 3), sizes) == (0, 7)
    assert fully_visible_range(own, 1, Rows(2, 3), sizes) == (0, 0)
    assert static_visible_range(own, Rows(2, 3), sizes) == (0, 7)
    assert found == [(0, 0, (2, 5), sizes)]  # a static mask is the same for all entries: once
    found.clear()
    visible_range(asked(Lengths, found)(np.asarray([3, 4])), 1, Rows(2, 3), sizes)
    assert found == [(0, 0, (2, 5), sizes)]


def test_what_shows_nothing_hides_everything():
    sizes = Sizes((1,), 1, 5, 7)
    apart = Prefix(2) & ~Prefix(4)
    lo, hi = visible_range(apart, 0, Rows(1, 2), sizes)
    assert lo > hi and fully_visible_range(~apart, 0, Rows(1, 2), sizes) == (0, 7)


def test_ids_may_be_numpys_and_any_integers():
    ids = np.asarray([[0, 1, 1], [2, 2, 2]]), np.asarray([[0, 1, 1, 3], [2, 5, 2, 2]])
    sizes = Sizes((2,), 1, 3, 4)
    mask = Segments(q_ids=ids[0], kv_ids=ids[1])
    with jax.enable_x64(True), jax.disable_jit():
        for b, most, least in ((0, (1, 3), (1, 3)), (1, (0, 4), (0, 0))):
            for get, want in ((visible_range, most), (fully_visible_range, least)):
                found = get(mask, jnp.asarray(b), Rows(jnp.asarray(1), 2), sizes)
                assert tuple(map(int, found)) == want and found[0].dtype == jnp.int32


def test_what_is_known_beforehand_is_never_narrower():
    for mask, _, sizes in drawn_masks(10, *SHAPES):
        for rows in runs(sizes.T)[::3]:
            lo, hi = static_visible_range(mask, rows, sizes)
            first, last = static_fully_visible_range(mask, rows, sizes)
            assert all(type(n) is int for n in (lo, hi, first, last))
            for b in range(sizes.B if rows.size == 2 else 1):
                least, most = (int(n) for n in visible_range(mask, b, rows, sizes))
                sure, until = (int(n) for n in fully_visible_range(mask, b, rows, sizes))
                assert least >= most or (lo <= least and most <= hi)
                assert first >= last or (first, last) == (sure, until)
                if mask.is_static:
                    assert (lo, hi, first, last) == (least, most, sure, until)


def test_whether_all_keys_are_seen():
    for T, S in (*SHAPES, (1, 4), (4, 1), (2, 9)):
        sizes = Sizes((1,), 1, T, S)
        for name, mask in SIMPLE.items():
            want = table(mask, sizes)[0, 0].any(0).all()
            assert every_key_visible(mask.bind(sizes), sizes) is bool(want), name
    for mask, seen, sizes in drawn_masks(20, *SHAPES):
        if mask.is_static and every_key_visible(mask, sizes):
            assert seen[0, 0].any(0).all()
    sizes = Sizes((1,), 1, 4, 6)
    assert every_key_visible(~Causal(-1), sizes) and not every_key_visible(~Causal(), sizes)
    assert every_key_visible.cache_parameters()["maxsize"] is not None
