"""The laws of masks at positions: visible keys, and the ranges by which blocks are skipped."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
)
from flax_attn._internal.types import Sizes, frozen
from flax_attn.masks import Mask, Rows
from flax_attn.masks.at_positions import AtPositions, at_positions, presence_in
from flax_attn.places import Places, Positions

B, N, T, S = 2, 3, 5, 9
SIZES = Sizes((B,), N, T, S)
# In order; a ring; any order with gaps; all of one batch entry absent.
QUERIES = [[[3, 4, 5, 6, 7], [0, -1, 2, 3, -2]], [[9, 2, 11, 4, -1], [-1, -1, -1, -1, -1]]]
KEYS = [
    [[0, 1, 2, 3, 4, 5, 6, 7, 8], [4, 5, 6, 7, -1, 0, 1, 2, 3]],
    [[8, 3, -1, 11, 0, 2, 14, -3, 5], [-1, 5, 6, 7, 8, -1, -1, -1, -1]],
    [[-1] * S, [2, 2, 2, 0, 1, 7, 7, 8, -1]],
]
AT = [Positions(np.asarray(q), np.asarray(k)) for q in QUERIES for k in KEYS]
LENGTHS = Lengths(np.asarray([6, 4]), q=np.asarray([5, 8]))
tables = jax.jit(lambda mask: (mask(*SIZES.grid()), mask.grid(SIZES)))


def gap(low, high):
    return lambda b, n, q, k: (k - q >= low) & (k - q <= high)


MASKS = {
    "causal": (CAUSAL, gap(-99, 0)),
    "window": (Window(2, 1), gap(-2, 1)),
    "chunks": (Chunked(3), lambda b, n, q, k: q // 3 == k // 3),
    "prefix": (Prefix(4), lambda b, n, q, k: k < 4),
    "lengths": (
        LENGTHS,
        lambda b, n, q, k: (k < np.where(b, 4, 6)) & (q < np.where(b, 8, 5)),
    ),
    "function": (MaskFn(lambda b, n, q, k: (q + k + n + b) % 2 == 0), None),
    "not causal": (~CAUSAL, gap(1, 99)),
    "past alone": (CAUSAL & ~Window(0, 0), gap(-99, -1)),
    "all but some": (~(CAUSAL & Window(1, 0)), lambda b, n, q, k: ~gap(-1, 0)(b, n, q, k)),
    "prefix model": (CAUSAL | Prefix(3), lambda b, n, q, k: (k <= q) | (k < 3)),
    "full": (FULL, lambda b, n, q, k: True),
    "nothing": (~FULL, lambda b, n, q, k: False),
}


def truth(at: Positions, meaning) -> np.ndarray:
    """Who sees what, B N T S, by positions; what is absent sees nothing and is not seen."""
    b, n, _, _ = SIZES.grid()
    q, k = np.asarray(at.q)[:, None, :, None], np.asarray(at.k)[:, None, None, :]
    seen = meaning(b, n, q, k) & (q >= 0) & (k >= 0)
    return np.broadcast_to(seen, (B, N, T, S))


def by_function(b, n, q, k):
    return (q + k + n + b) % 2 == 0


def cases():
    for i, (name, (mask, meaning)) in enumerate(MASKS.items()):
        for at in AT[i % 2 :: 2]:
            bound = at_positions(mask, at.bind(SIZES)).bind(SIZES)
            yield name, bound, truth(at, meaning or by_function)


def shown(mask: Mask) -> np.ndarray:
    return np.broadcast_to(tables(mask)[0], (B, N, T, S))


def test_masks_are_evaluated_at_positions_and_hide_absent_keys():
    for name, mask, seen in cases():
        for found in tables(mask):
            assert (np.broadcast_to(found, seen.shape) == seen).all(), name
        assert not mask.is_static and mask.as_band() is None


def test_ranges_hold_for_all_queries_of_a_block():
    runs = [Rows(*pair) for pair in ((2, 1), (0, 2), (1, 2), (3, 2), (0, T))]
    for name, mask, seen in cases():
        for b in range(B):
            for rows in runs:
                part = seen[b][:, slice(*rows)].reshape(-1, S)
                lo, hi = (int(x) for x in mask.key_range(b, 0, rows, SIZES))
                assert not part[:, : max(lo, 0)].any() and not part[:, max(hi, 0) :].any(), name
                lo, hi = (int(x) for x in mask.seen_range(b, 0, rows, SIZES))
                assert lo >= hi or (0 <= lo and hi <= S and part[:, lo:hi].all()), (name, rows)


def test_ranges_are_those_without_positions_where_position_is_index():
    """Otherwise no block would be skipped in a cache that is filled in order."""
    at = Positions(None, None).bind(SIZES)
    for name in ("causal", "window", "chunks", "prefix", "past alone", "full"):
        plain = MASKS[name][0].bind(SIZES)
        moved = at_positions(MASKS[name][0], at).bind(SIZES)
        for rows in (Rows(0, 2), Rows(2, 3), Rows(4, 1), Rows(0, T)):
            for asked in ("key_range", "seen_range"):
                want = getattr(plain, asked)(0, 0, rows, SIZES)
                got = tuple(int(x) for x in getattr(moved, asked)(0, 0, rows, SIZES))
                assert got == want or (got[0] >= got[1] and want[0] >= want[1]), (name, asked)


def test_ranges_of_what_is_absent_are_empty():
    at = AT[-1].bind(SIZES)  # no query of entry 1, no key of entry 0
    mask = at_positions(CAUSAL, at).bind(SIZES)
    for b in range(B):
        for asked in (mask.key_range, mask.seen_range):
            lo, hi = asked(b, 0, Rows(1, 3), SIZES)
            assert lo >= hi
    for pair in ((0, 2), (jnp.asarray(1), jnp.asarray(3))):  # of no known size
        assert mask.key_range(0, 0, pair, SIZES) == (0, S)
        assert mask.seen_range(0, 0, pair, SIZES) == (0, 0)


def test_ranges_of_a_users_class_may_end_beyond_all_keys():
    """Such a range is clipped to the keys."""

    class Near(Mask):
        def key_range(self, b, n, q, sizes):
            return q[0] - 99, q[1] + 2**28

        def seen_range(self, b, n, q, sizes):
            return q[0] - 99, q[1] - 99

    at = Positions(np.arange(T), np.arange(S)).bind(SIZES)
    mask = AtPositions(Near(), at)
    assert tuple(map(int, mask.key_range(0, 0, Rows(0, 2), SIZES))) == (0, S)
    assert tuple(map(int, mask.seen_range(0, 0, Rows(0, 2), SIZES))) == (0, 0)


def test_arrays_along_queries_or_keys_are_indexed_by_slot():
    array = np.random.RandomState(0).rand(B, 1, T, S) < 0.5
    ids = (
        np.asarray([[0, 0, 1, 1, 2], [5, 6, 6, 7, 7]]),
        np.sort(np.arange(S) % 4)[None] + [[0], [5]],
    )
    of = {
        "dense": (Dense(array), array),
        "segments": (
            Segments(q_ids=ids[0], kv_ids=ids[1]),
            (ids[0][:, :, None] == ids[1][:, None])[:, None],
        ),
    }
    for at in AT:
        past = truth(at, gap(-99, 0))
        present = truth(at, lambda b, n, q, k: True)
        for name, (mask, table) in of.items():
            for whole, want in (
                (mask, table & present),
                (CAUSAL & ~mask, past & ~table),
                (CAUSAL | mask, past | (table & present)),
            ):
                found = shown(at_positions(whole, at.bind(SIZES)).bind(SIZES))
                assert (found == want).all(), name


def test_positions_that_all_share_stay_one_row():
    at = Positions(np.arange(T) + 3, np.arange(S)[None]).bind(SIZES)
    assert at.q.shape == (1, T) and at.k.shape == (1, S)
    mask = at_positions(CAUSAL, at).bind(SIZES)
    assert mask.grid(SIZES).shape == (1, 1, T, S)
    want = np.arange(S) <= np.arange(T)[:, None] + 3
    assert (shown(mask) == want).all()
    assert [int(x) for x in mask.key_range(1, 0, Rows(0, 2), SIZES)] == [0, 5]


def test_functions_of_a_shard_receive_indices_of_the_whole():
    seen = []

    def fn(b, n, q, k):
        seen.append((b, n))
        return (q == k) & (b >= 0) & (n >= 0)

    places = Places(jnp.asarray([4, 7]), jnp.asarray([1, 2, 3])).bind(SIZES)
    mask = at_positions(MaskFn(fn).at(places), AT[0].bind(SIZES)).bind(SIZES).at(places)
    mask(*SIZES.grid())
    b, n = seen[-1]
    assert np.ravel(b).tolist() == [4, 7] and np.ravel(n).tolist() == [1, 2, 3]


def test_presence_is_found_where_it_was_joined():
    at = AT[0].bind(SIZES)
    for mask in (FULL, CAUSAL, CAUSAL & Window(2, 0), ~CAUSAL):
        found = presence_in(at_positions(mask, at))
        assert found is not None
        assert (shown(found) == truth(AT[0], lambda b, n, q, k: True)).all()
    for mask in (FULL, CAUSAL & Window(2, 0), ~AtPositions(CAUSAL, at)):
        assert presence_in(mask) is None


def test_ranges_may_be_traced():
    mask = at_positions(CAUSAL & Window(3, 0), AT[1].bind(SIZES)).bind(SIZES)

    def ranges(b, start):
        rows = Rows(start, 2)
        return mask.key_range(b, 0, rows, SIZES), mask.seen_range(b, 0, rows, SIZES)

    for b in range(B):
        for start in range(T - 1):
            got, want = jax.jit(ranges)(b, start), ranges(b, start)
            assert [int(x) for pair in got for x in pair] == [int(x) for pair in want for x in pair]


def exactly(mask: Mask, asked: str, b: int, rows: Rows) -> tuple[int, ...]:
    """A range, whose ends are 32-bit integers whatever the numbers of a program are."""
    with jax.enable_x64(True):
        found = jax.jit(lambda mask: getattr(mask, asked)(b, 0, rows, SIZES))(mask)
        assert all(end.dtype == jnp.int32 for end in found)
    return tuple(int(end) for end in found)


def test_ranges_are_as_narrow_as_positions_say():
    at = Positions(
        np.asarray([[9, 2, 11, 4, -1], [20, 21, 22, 23, 24]]),
        np.asarray([[8, 3, -1, 11, 0, 2, 14, -3, 5], [12, 13, 14, 15, 16, 17, 18, 19, 30]]),
    ).bind(SIZES)
    window = AtPositions(Window(2, 1).bind(SIZES), at)
    assert exactly(window, "key_range", 0, Rows(3, 2)) == (1, 9)  # 4 sees positions 2 to 5
    assert exactly(window, "key_range", 0, Rows(4, 1)) == (S, 0)  # absent
    assert exactly(window, "key_range", 0, Rows(2, 1)) == (3, 4)  # 11 sees 9 to 12
    assert exactly(AtPositions(~FULL, at), "key_range", 1, Rows(0, 1)) == (S, 0)
    causal = AtPositions(CAUSAL.bind(SIZES), at)
    assert exactly(causal, "key_range", 1, Rows(0, T)) == (0, 8)
    assert exactly(causal, "seen_range", 1, Rows(0, T)) == (0, 8)


@frozen
class Anywhere(Mask):
    """Shows every key, and says so in numbers that no key has."""

    AXES: ClassVar = {}

    def __call__(self, b, n, q, k):
        return (q >= -9) & (k >= -9)

    def key_range(self, b, n, q, sizes):
        return -9, sizes.S + 9

    seen_range = key_range


def test_absent_keys_are_outside_every_range():
    at = Positions(np.arange(T), np.asarray([-3, -1, 4, 5, 6, 7, 8, 9, -2])).bind(SIZES)
    mask = AtPositions(Anywhere(), at)
    for asked in ("key_range", "seen_range"):
        assert exactly(mask, asked, 0, Rows(0, T)) == (2, 8)


def test_a_shard_knows_what_is_present():
    at = Positions(np.arange(T), np.arange(S)).bind(SIZES)
    places = Places(jnp.asarray([1, 0]), jnp.asarray([0, 1, 2])).bind(SIZES)
    mask = at_positions(CAUSAL, at)
    assert presence_in(mask) is not None and presence_in(mask.at(places)) is not None


def test_each_entry_has_its_own_ranges():
    at = Positions(None, None).bind(SIZES)
    mask = AtPositions(Lengths(np.asarray([3, 7])), at).bind(SIZES)
    for asked in ("key_range", "seen_range"):
        assert [exactly(mask, asked, b, Rows(0, 2)) for b in range(B)] == [(0, 3), (0, 7)]


def test_a_mask_is_evaluated_at_positions_beyond_the_slots():
    at = Positions(np.arange(T) + 40, np.arange(S) + 20).bind(SIZES)
    mask = AtPositions(Causal(-16), at).bind(SIZES)
    assert (shown(mask) == (np.arange(S) + 20 <= np.arange(T)[:, None] + 24)).all()


def test_a_shard_at_positions_receives_indices_of_the_whole():
    at = Positions(np.arange(T), np.arange(S)).bind(SIZES)
    places = Places(jnp.asarray([1, 0]), jnp.asarray([0, 1, 2])).bind(SIZES)
    mask = AtPositions(MaskFn(lambda b, n, q, k: k < 3 + 4 * b), at).at(places)
    assert isinstance(mask, AtPositions)
    assert (shown(mask)[:, 0, 0] == (np.arange(S) < np.asarray([[7], [3]]))).all()


def test_a_mask_at_positions_is_dynamic_and_has_two_leaves():
    at = Positions(np.arange(T), np.arange(S)).bind(SIZES)
    whole = at_positions(FULL, at)
    assert isinstance(whole, AtPositions) and whole.is_static is False
    assert at_positions(CAUSAL & FULL, at) == AtPositions(CAUSAL & FULL, at)  # asked once for both
    assert type(whole.mask)() == type(whole.mask)() and len(jax.tree.leaves(whole)) == 2
    assert isinstance(AtPositions(FULL, at).grid(SIZES), jax.Array)


def test_a_mask_that_counts_from_the_end_has_no_positions():
    at = Positions(np.arange(T), np.arange(S)).bind(SIZES)
    with pytest.raises(ValueError, match="counts from the last slot"):
        at_positions(Causal("end"), at)
