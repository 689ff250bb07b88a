"""The laws of masks as bands, runs and segments, for library and user classes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import frozen
from flax_attn._internal.types import Sizes
from flax_attn.backends import splash, tokamax
from flax_attn.backends.blockwise import plan as planning
from flax_attn.backends.blockwise.block import Block
from flax_attn.backends.blockwise.block_loops import scan_key_blocks
from flax_attn.masks import (
    CAUSAL,
    FULL,
    Band,
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
from flax_attn.masks.algebra import parts_of
from flax_attn.masks.ranges import fully_visible_range as inner
from flax_attn.masks.ranges import visible_range as outer
from flax_attn.places import Places
from flax_attn.rules import Rules

B, N, T, S = 2, 3, 5, 7
SIZES = Sizes((B,), N, T, S)
KV, QL = np.asarray([4, 2]), np.asarray([5, 3])
OFFSETS = np.asarray([2, -9])
RUNS = [Rows(start, size) for size in (1, 2, T) for start in range(T - size + 1)]


def numbers(found: tuple[Any, Any]) -> tuple[int, int]:
    return int(found[0]), int(found[1])


def test_masks_that_are_bands():
    three, four, rows = np.asarray([3, 1]), np.asarray([4, 2]), np.asarray([2, 1])
    for mask, want in (
        (FULL, Band()),
        (CAUSAL, Band(None, 0)),
        (Causal(3), Band(None, 3)),
        (Causal(np.int64(-2)), Band(None, -2)),
        (Window(2, 1), Band(-2, 1)),
        (Window(2, None), Band(-2, None)),
        (Window(None, 1), Band(None, 1)),
        (Window(2, 1, 5), Band(3, 6)),
        (Window(0, 0, np.int32(-1)), Band(-1, -1)),
        (Lengths(three), Band(kv=three)),
        (Lengths(three, q=rows), Band(kv=three, rows=rows)),
        (Prefix(three), Band(kv=three)),
        (CAUSAL & Window(2, 5), Band(-2, 0)),
        (Window(2, 5) & Window(3, 4), Band(-2, 4)),
        (Window(3, 4) & Window(2, 5), Band(-2, 4)),
        (Lengths(three) & CAUSAL & Lengths(four), Band(None, 0, np.asarray([3, 1]))),
        (Lengths(four, q=rows) & Lengths(three), Band(None, None, np.asarray([3, 1]), rows)),
        (Lengths(three, q=three) & Lengths(four, q=rows), Band(None, None, three, rows)),
        (FULL & FULL, Band()),
    ):
        found = mask.as_band()
        assert isinstance(found, Band)
        assert (found.lo, found.hi) == (want.lo, want.hi), mask
        assert all(end is None or type(end) is int for end in (found.lo, found.hi))
        for a, b in zip(found[2:], want[2:], strict=True):
            assert (a is None) == (b is None) and (a is None or np.array_equal(a, b)), mask
    none = Causal(jnp.asarray(1)), ~CAUSAL, CAUSAL | FULL, Dense(np.ones((T, S), bool))
    for mask in (*none, none[0] & CAUSAL, CAUSAL & none[1], Window(1, 1, np.asarray([1, 2]))):
        assert mask.as_band() is None


def test_parts_of_an_and():
    a, b, c = CAUSAL, Window(1, 1), Lengths(np.asarray([1, 2]))
    assert parts_of(a) == [a] and parts_of(a & b) == [a, b]
    assert parts_of((a & b) & c) == [a, b, c] == parts_of(a & (b & c))
    (one,) = parts_of(a | b)
    assert one == (a | b)


# Masks as runs and as segments.

Q = np.arange(T, dtype=np.int32)[None]


def shown_by(mask: Mask) -> np.ndarray:
    """Who sees whom, B T S, by the run of each query."""
    runs = mask.bind(SIZES).as_runs(Q)
    assert runs is not None
    first, end = (
        x if n is None else np.broadcast_to(np.asarray(n), (B, T))[..., None]
        for n, x in zip(runs, (0, S), strict=True)
    )
    return np.broadcast_to((np.arange(S) >= first) & (np.arange(S) < end), (B, T, S))


def test_masks_that_are_one_run_a_query():
    for mask in (
        FULL,
        CAUSAL,
        Causal(-2),
        Window(1, 2),
        Window(2, None, 1),
        Chunked(3),
        Prefix(2),
        Prefix(KV),
        Lengths(KV),
        Chunked(3) & (CAUSAL | Prefix(2)),
        Chunked(4) & Chunked(3),
        Window(2, 1) & Lengths(KV) & Chunked(3),
        Prefix(KV) | Causal(-1),
    ):
        seen = np.broadcast_to(mask.bind(SIZES)(*SIZES.grid()), SIZES.shape)[:, 0]
        assert np.array_equal(shown_by(mask), seen), mask
    assert shown_by(Lengths(KV, q=QL))[1].all(0).tolist() == [k < KV[1] for k in range(S)]
    for part in FULL.as_runs(Q), CAUSAL.as_runs(Q)[:1], Window(1, None).as_runs(Q)[1:]:
        assert all(end is None for end in part)
    (end,) = (Lengths(np.asarray([1, 2], np.int8)).as_runs(Q) or (None, None))[1:]
    assert end.dtype == jnp.int32 and end.shape == (2, 1)
    several = ~CAUSAL, Window(0, 0) | Prefix(1), CAUSAL | Lengths(KV, q=QL)
    several += Dense(np.ones((T, S), bool)), MaskFn(lambda *at: True)
    for mask in (*several, several[0] & Chunked(2), Chunked(2) & several[1]):
        assert mask.bind(SIZES).as_runs(Q) is None


def test_segments_alone_have_ids():
    ids = np.arange(T) // 2, np.arange(S) // 3
    for mask in (Segments(q_ids=ids[0], kv_ids=ids[1]), Segments(ids[0])):
        found = mask.as_segments()
        want = ids if mask.ids is None else (ids[0], ids[0])
        assert found is not None and all(a is b for a, b in zip(found, want, strict=True))
    bound = Segments(q_ids=ids[0], kv_ids=ids[1]).bind(SIZES).as_segments()
    assert bound is not None and [x.shape for x in bound] == [(B, T), (B, S)]
    for mask in (FULL, CAUSAL, Chunked(2), CAUSAL & Segments(ids[0]), ~Segments(ids[0])):
        assert mask.as_segments() is None
    base = Mask()
    assert (base.as_band(), base.as_runs(Q), base.as_segments()) == (None, None, None)
    assert base.seen_range(0, 0, (0, 1), SIZES) == (0, 0)


def test_rows_are_a_pair_with_a_static_size():
    rows = Rows(3, 2)
    assert rows == (3, 5) and isinstance(rows, tuple) and rows.size == 2
    first, end = jax.vmap(lambda at: tuple(Rows(at, 2)))(jnp.asarray([4]))
    assert (first.tolist(), end.tolist()) == ([4], [6])


def test_segments_of_a_plain_pair_are_not_counted():
    mask = Segments(q_ids=np.zeros(T, int), kv_ids=np.arange(S)).bind(SIZES)
    assert mask.key_range(0, 0, (1, 3), SIZES) == (0, S)
    assert mask.seen_range(0, 0, (1, 3), SIZES) == (0, 0)
    assert [int(x) for x in mask.key_range(0, 0, Rows(1, 2), SIZES)] == [0, 1]


def test_ranges_of_library_masks_stay_within_the_keys():
    """Ranges of library masks need no clipping; those of user classes do."""
    for mask in (
        FULL,
        *(Causal(offset) for offset in (0, 3, -3, 40, -40, OFFSETS)),
        *(Window(2, 1, offset) for offset in (0, 4, -4, 40, -40, OFFSETS)),
        *(Window(None, 1, -2), Window(1, None, 3)),
        *(Chunked(size) for size in (1, 2, 3, 9)),
        *(Prefix(length) for length in (-2, 0, 3, 99, KV * 5)),
        *(Lengths(KV * 5 - 10), Lengths(KV * 3, q=QL)),
    ):
        mask = mask.bind(SIZES)
        for rows in RUNS:
            for get, own in ((outer, mask.key_range), (inner, mask.seen_range)):
                assert numbers(own(1, 0, rows, SIZES)) == numbers(get(mask, 1, rows, SIZES)), mask


# A user's classes, which say all that ours do.


@frozen
class Near(Mask):
    """As Window, with ranges that may end beyond the keys."""

    left: int
    right: int
    offset: int

    is_static = True

    def __call__(self, b, n, q, k):
        return (k - q >= self.offset - self.left) & (k - q <= self.offset + self.right)

    def key_range(self, b, n, q, sizes):
        return q[0] + self.offset - self.left, q[1] + self.offset + self.right

    def seen_range(self, b, n, q, sizes):
        return q[1] - 1 + self.offset - self.left, q[0] + 1 + self.offset + self.right

    def as_band(self):
        return Band(self.offset - self.left, self.offset + self.right)


@frozen
class Reaching(Near):
    """The same without all answers but its elements and the keys that it shows at most."""

    seen_range = Mask.seen_range
    as_band = Mask.as_band


@frozen
class First(Mask):
    """As Lengths, for batch entries of the whole."""

    length: Any

    def __call__(self, b, n, q, k):
        return k < jnp.asarray(self.length)[b]

    def key_range(self, b, n, q, sizes):
        return -1, jnp.asarray(self.length)[b]

    def seen_range(self, b, n, q, sizes):
        return -1, jnp.asarray(self.length)[b]

    def as_band(self):
        return Band(kv=self.length)


@frozen
class Documents(Mask):
    """As Segments, for batch entries of the whole."""

    q: Any
    k: Any

    def __call__(self, b, n, q, k):
        return jnp.asarray(self.q)[b, q] == jnp.asarray(self.k)[b, k]

    def as_segments(self):
        return self.q, self.k


PROGRAMS = {
    "alone": lambda x: x,
    "not": lambda x: ~x,
    "and": lambda x: x & Causal(1),
    "or": lambda x: Prefix(2) | x,
    "not and": lambda x: ~(Window(1, 4) & x),
    "not or": lambda x: ~(x | Prefix(2)),
    "or not": lambda x: ~x | Causal(-3),
    "and not": lambda x: Chunked(3) & ~x,
    "not not": lambda x: ~~x,
    "and lengths": lambda x: x & Lengths(KV, q=QL),
    "twice": lambda x: x & x | x,
}
ENDS = [(0, 0), (2, 0), (0, 3), (1, 1), (9, 1), (1, 9)]


def test_a_users_mask_has_the_ranges_of_the_library_mask():
    for name, program in PROGRAMS.items():
        for at in ((*ends, offset) for ends in ENDS for offset in (0, 3, -4, 12, -12)):
            mine, ours = (program(kind(*at)).bind(SIZES) for kind in (Near, Window))
            assert mine.is_static is ours.is_static is (name != "and lengths")
            for rows in RUNS if mine.is_static else RUNS[::8]:
                for get in (planning.static_visible_range, planning.static_fully_visible_range):
                    found = get(mine, rows, SIZES)
                    assert found == get(ours, rows, SIZES), (name, at, rows)
                    assert all(type(n) is int for n in found)
                for get in (outer, inner):
                    found, want = get(mine, 1, rows, SIZES), get(ours, 1, rows, SIZES)
                    assert numbers(found) == numbers(want), (name, at, rows)
    for name in ("alone", "not", "or", "not and"):
        mine, ours = (PROGRAMS[name](kind(KV)).bind(SIZES) for kind in (First, Prefix))
        for rows in RUNS[::4]:
            for get in (outer, inner):
                found, want = get(mine, 1, rows, SIZES), get(ours, 1, rows, SIZES)
                assert numbers(found) == numbers(want), (name, rows)


def test_a_users_mask_receives_traced_blocks():
    program = PROGRAMS["not and"](Near(1, 1, 0)) | Near(0, 1, -9)
    for get in (outer, inner):
        traced = jax.vmap(lambda at, get=get: jnp.asarray(get(program, 0, Rows(at, 2), SIZES)))
        known = [list(get(program, 0, Rows(at, 2), SIZES)) for at in range(T - 1)]
        assert traced(jnp.arange(T - 1)).tolist() == known


def test_a_class_with_a_key_range_alone_is_skipped_and_right():
    for name, program in PROGRAMS.items():
        for at in ((*ends, offset) for ends in ENDS for offset in (0, 3, -4)):
            mine, ours = (program(kind(*at)).bind(SIZES) for kind in (Reaching, Window))
            seen = np.broadcast_to(ours(*SIZES.grid()), SIZES.shape)[1, 0]
            for rows in RUNS:
                part = seen[slice(*rows)]
                lo, hi = numbers(outer(mine, 1, rows, SIZES))
                assert not part[:, : max(lo, 0)].any() and not part[:, max(hi, 0) :].any()
                if name in ("alone", "and", "or", "twice", "and lengths"):
                    assert (lo, hi) == numbers(outer(ours, 1, rows, SIZES)), (name, at, rows)
                lo, hi = numbers(inner(mine, 1, rows, SIZES))
                assert lo >= hi or part[:, lo:hi].all()
                if name == "not":
                    assert (lo, hi) == numbers(inner(ours, 1, rows, SIZES)), (at, rows)


def visited(mask: Mask, sizes: Sizes) -> list[tuple[int, int, int, bool]]:
    """First query, first key, keys and whether it is masked, of every block."""
    plan = planning.make_plan(sizes, N, Rules(mask), "cpu")
    assert plan.unrolled

    def step(found, at, masked):
        return [*found, (at.q, at.k, at.cols, masked)]

    starts = range(0, sizes.T, plan.rows)
    at = [Block(0, 0, q, 0, 1, min(plan.rows, sizes.T - q), sizes.S) for q in starts]
    return [block for one in at for block in scan_key_blocks(plan, mask, one, step, [])]


def test_a_users_mask_is_planned_and_skipped_like_a_library_mask():
    sizes = Sizes((B,), N, 600, 600)
    for at in ((50, 0, 0), (900, 0, 300), (0, 0, 0)):
        for program in PROGRAMS.values():
            mine, ours = (program(kind(*at)).bind(sizes) for kind in (Near, Window))
            for platform in ("cpu", "gpu"):
                plans = [planning.make_plan(sizes, N, Rules(m), platform) for m in (mine, ours)]
                assert plans[0] == plans[1]
            assert visited(mine, sizes) == visited(ours, sizes)
    blocks = visited(Near(900, 0, 300), sizes)
    assert sum(count for _, _, count, _ in blocks) < 600 * len({q for q, *_ in blocks})
    assert {masked for *_, masked in blocks} == {True, False}
    assert {masked for *_, masked in visited(Reaching(900, 0, 300), sizes)} == {True}


def test_combinations_pass_on_calls_for_all_heads():
    found: list[Any] = []

    class Asked(Mask):
        def key_range(self, *at):
            found.append(at)
            return 1, 3

        def seen_range(self, *at):
            found.append(at)
            return 1, 3

    at = (1, 2, Rows(3, 1), SIZES)
    one = Asked()
    for mask, most, least in (
        (one & Asked(), (1, 3), (1, 3)),
        (one | Asked(), (1, 3), (1, 3)),
        (~one, (0, S), (3, S)),
    ):
        for get, want in ((mask.key_range, most), (mask.seen_range, least)):
            assert get(*at) == want
            assert found == [(1, 0, *at[2:])] * (1 if mask == ~one else 2)
            found.clear()


# What the kernels of other libraries take.


@frozen
class Moving(Near):
    """A window that does not say that it is static."""

    is_static = False


def same_arrays(one: Any, two: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def test_kernels_read_a_users_mask_like_a_library_mask():
    ids = np.arange(B * T).reshape(B, T) // 4, np.arange(B * S).reshape(B, S) // 5
    first, documents = First(KV), Documents(*ids)
    assert Near(2, 1, 0).as_band() == Window(2, 1).as_band() == Band(-2, 1)
    assert (Near(2, 1, 0) & CAUSAL).as_band() == Band(-2, 0)
    segments = Segments(q_ids=ids[0], kv_ids=ids[1])
    for mine, ours in (
        (first, Lengths(KV)),
        (documents, segments),
        (Near(2, 1, 0) & first & documents, Window(2, 1) & Lengths(KV) & segments),
        (Near(2, 1, 0) & CAUSAL, Window(2, 1) & CAUSAL),
    ):
        mine, ours = mine.bind(SIZES), ours.bind(SIZES)
        assert splash._of_mask(mine, SIZES) is None is splash._of_mask(ours, SIZES)
        assert same_arrays(splash._ids(mine, SIZES), splash._ids(ours, SIZES))
        if mine.as_runs(Q) is not None:
            assert same_arrays(tokamax._run_ends(mine, SIZES), tokamax._run_ends(ours, SIZES))
        else:
            assert ours.as_runs(Q) is None


def test_what_a_kernel_would_leave_out_is_refused():
    """Splash takes the window of a static mask, and lengths and ids of the others."""
    text = splash._of_mask(Moving(2, 1, 0) & CAUSAL, SIZES)
    assert text == "takes static masks, Segments, Documents and Lengths; got Moving"
    for band in (Band(lo=0), Band(hi=0)):
        assert splash._is_lengths(Banded(band)) is False
    for band in (Band(), Band(kv=3), Band(rows=KV), Band(None, None, KV, QL)):
        assert splash._is_lengths(Banded(band)) is True
    assert splash._is_lengths(MaskFn(lambda *at: True)) is False
    whole = splash._ids(Banded(Band(rows=KV)), SIZES)
    assert [np.asarray(x).any() for x in whole] == [False, False]
    _, keys = splash._ids(Banded(Band(kv=3)), SIZES)
    assert np.array_equal(keys, np.broadcast_to(np.arange(S) >= 3, (B, S)) * -1)


class Banded(Mask):
    """Any band, as it is given."""

    def __init__(self, band: Band):
        self.band = band

    def as_band(self):
        return self.band


def test_ranges_of_a_users_mask_are_shifted_to_a_shard():
    """Entries 4 and 1 of five, and heads that stand elsewhere."""
    places = Places(np.asarray([4, 1]), np.asarray([2, 7, 4])).bind(SIZES)
    length = np.asarray([0, 6, 5, 3, 2])
    ids = np.arange(5 * T).reshape(5, T) // 4, np.arange(5 * S).reshape(5, S) // 5
    here = places.b
    first, documents = First(length).at(places).bind(SIZES), Documents(*ids).at(places).bind(SIZES)
    ours = Lengths(length[here]).bind(SIZES)
    band = first.as_band()
    assert band is not None and band[:2] == (None, None) and band.rows is None
    assert np.array_equal(band.kv, length[here])
    assert same_arrays(first.as_runs(Q), ours.as_runs(Q))
    assert same_arrays(documents.as_segments(), (ids[0][here], ids[1][here]))
    for b in range(B):
        for rows in RUNS[:3]:
            assert numbers(outer(first, b, rows, SIZES)) == numbers(outer(ours, b, rows, SIZES))
            assert numbers(inner(first, b, rows, SIZES)) == numbers(inner(ours, b, rows, SIZES))
    near = Near(2, 1, 0).at(places)
    assert near.as_band() == Band(-2, 1) and near.as_segments() is None
    assert same_arrays(near.as_runs(Q), Window(2, 1).as_runs(Q))
    for kv in (3, np.asarray([3])):  # one for all entries
        assert np.array_equal(First(kv).at(places).as_band().kv, kv)
