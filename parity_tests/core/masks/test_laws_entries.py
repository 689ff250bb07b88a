"""The laws of arrays in masks and scores: their axes, shards and batch entries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import frozen, masks, scores
from flax_attn._internal.arrays import INT32_MAX
from flax_attn._internal.types import Sizes
from flax_attn.masks.algebra import check_array
from flax_attn.parity import judge
from flax_attn.places import Places

B, N, T, S = 2, 3, 4, 6
SIZES = Sizes((B,), N, T, S)
OFFSETS = np.asarray([-1, 2])
PLACES = Places(np.asarray([5, 3]), np.asarray([2, 7, 4])).bind(SIZES)
AT_Q, AT_K = np.arange(T)[:, None], np.arange(S)[None]


def by_place(b, n, q, k):
    return (b + 2 * n + q + k) % 3 > 0


def bent(params, x, b, n, q, k):
    return x * params + (b + 10 * n).astype(x.dtype)


def test_every_array_declares_its_axes():
    for kind, axes in (
        (masks.Causal, {"offset": "b"}),
        (masks.Window, {"offset": "b"}),
        (masks.Prefix, {"length": "b"}),
        (masks.Lengths, {"kv": "b", "q": "b"}),
        (masks.Segments, {"ids": "bq", "q_ids": "bq", "kv_ids": "bk"}),
        (masks.Dense, {"array": "bnqk"}),
        (scores.Alibi, {"slopes": "bn", "offset": "b"}),
        (scores.T5Bias, {"table": ".n", "offset": "b"}),
        (scores.Additive, {"array": "bnqk"}),
    ):
        assert kind.AXES == axes


def test_places_of_a_shard_reach_the_functions_inside_a_mask():
    fn, plain = masks.MaskFn(by_place), masks.Causal(1)
    placed, grid = masks.MaskFn(by_place, PLACES), jax.jit(lambda mask: mask.grid(SIZES))
    for mask, want in (
        (fn, placed),
        (plain, plain),
        (fn & plain, placed & plain),
        (plain & fn, plain & placed),
        (fn | plain, placed | plain),
        (plain | fn, plain | placed),
        (~fn, ~placed),
        (~(fn & (plain | fn)), ~(placed & (plain | placed))),
    ):
        assert mask.at(PLACES) == want
        assert np.array_equal(grid(mask.at(PLACES)), grid(want))
    bend, cap = scores.ScoreFn(bent, np.asarray(2.0)), scores.Softcap(3.0)
    moved = scores.ScoreFn(bend.fn, bend.params, PLACES)
    for score, want in (
        (bend, moved),
        (cap, cap),
        (bend >> cap, moved >> cap),
        (cap >> bend, cap >> moved),
    ):
        assert score.at(PLACES) == want


@frozen
class Own(masks.Mask):
    """A mask of a user's, which says nothing of shards."""

    table: Any

    def __call__(self, b, n, q, k):
        return jnp.asarray(self.table)[b, n] + q > k

    def key_range(self, b, n, q, sizes):
        return b - 2, n + q[1]


@frozen
class OwnScore(scores.Score):
    """A score of a user's."""

    table: Any

    def __call__(self, logits, b, n, q, k):
        return logits + (jnp.asarray(self.table)[b, n] * (q - k)).astype(logits.dtype)


def test_a_users_class_receives_indices_of_the_whole_array():
    table = np.arange(48).reshape(6, 8) % 7
    mask, score = Own(table), OwnScore(table)
    assert mask.is_static is False and isinstance(mask.bind(SIZES).table, jax.Array)
    assert isinstance(score.bind(SIZES).table, jax.Array)
    places = PLACES
    b, n, q, k = SIZES.grid()
    whole = np.asarray(places.b)[b], np.asarray(places.n)[n], q, k
    moved, logits = mask.at(places), jnp.asarray(np.random.RandomState(0).rand(*SIZES.shape))
    assert type(moved) is not Own and moved.is_static is False
    bent = score.at(places)
    for again in (moved, moved.bind(SIZES), mask.at(Places()).at(places)):
        assert np.array_equal(again(*SIZES.grid()), mask(*whole))
        assert np.array_equal(again.grid(SIZES), mask(*whole))
    for again in (bent, bent.bind(SIZES), score.at(Places()).at(places)):
        assert judge.exact(again(logits, *SIZES.grid()), score(logits, *whole)).ok
        assert judge.exact(again.grid(logits, SIZES), score(logits, *whole)).ok
    assert isinstance(moved.bind(SIZES).mask.table, jax.Array)
    assert isinstance(bent.bind(SIZES).score.table, jax.Array)
    for entry in range(B):  # for all heads at once, which is n = 0
        found = moved.key_range(entry, 1, (2, 4), SIZES)
        assert [int(x) for x in found] == [places.b[entry] - 2, 4]


def test_a_class_without_declared_axes_is_left_unchanged():
    @frozen
    class ByHead(masks.Mask):
        by: int

        def __call__(self, b, n, q, k):
            return n * self.by + q >= k

    assert ByHead(1).is_static is False and ByHead(1).static(SIZES) is None
    for base in (masks.Mask(), scores.Score()):
        assert base.bind(SIZES) is base


def test_a_users_class_may_be_static():
    @frozen
    class Even(masks.Mask):
        is_static = True

        def __call__(self, b, n, q, k):
            return jnp.asarray((q - k) % 2 == 0)

    even = Even()
    assert even.at(PLACES).is_static is True and (even & masks.CAUSAL).is_static is True
    seen = jax.jit(lambda x: x + even.static(SIZES).sum())(0)
    want = (np.arange(SIZES.T)[:, None] - np.arange(SIZES.S)) % 2 == 0
    assert int(seen) == want.sum() and np.array_equal(even.static(SIZES), want)


def test_lists_of_numbers_are_arrays():
    for node, names in (
        (masks.Causal([0, 1]), ("offset",)),
        (masks.Window(1, 2, [0, 1]), ("offset",)),
        (masks.Prefix([3, 1]), ("length",)),
        (masks.Lengths([3, 1], q=[2, 2]), ("kv", "q")),
        (masks.Lengths([3, 1], q=(2, 2)), ("kv", "q")),
        (masks.Segments(q_ids=[[1, 2]], kv_ids=[[3, 4]]), ("q_ids", "kv_ids")),
        (masks.Segments([[1, 2]]), ("ids",)),
        (scores.Alibi([0.5, 0.25], [1, 2]), ("slopes", "offset")),
    ):
        for name in names:
            assert isinstance(getattr(node, name), np.ndarray)


def test_counts_are_numbers_of_python():
    window = masks.Window(np.uint8(3), np.int64(2))
    assert type(window.left) is type(window.right) is int and (window.left, window.right) == (3, 2)
    assert masks.Window(None, 2).left is None and masks.Window(2, None).right is None
    assert type(masks.Chunked(np.int64(4)).size) is int and masks.Chunked(2**40).size == INT32_MAX


def asked(mask, b):
    """Who sees what in one batch entry, by its own formula, T S."""
    return np.broadcast_to(mask(b, 0, AT_Q, AT_K), (T, S))


def test_every_entry_has_its_own_offset():
    for offset in (OFFSETS, list(OFFSETS), jnp.asarray(OFFSETS, "int8"), OFFSETS.astype("int64")):
        for mask, one in (
            (masks.Causal(offset), masks.Causal),
            (masks.Window(1, 2, offset), lambda x: masks.Window(1, 2, x)),
            (masks.Window(None, 1, offset), lambda x: masks.Window(None, 1, x)),
        ):
            bound = mask.bind(SIZES)
            grid = np.broadcast_to(bound.grid(SIZES), (B, N, T, S))
            assert bound.offset.dtype == jnp.int32
            for b in range(B):
                want = asked(one(int(OFFSETS[b])), b)
                assert np.array_equal(asked(bound, b), want)
                assert np.array_equal(grid[b, 0], want)
                rows = 1, 3
                lo, hi = (int(x) for x in bound.key_range(b, 0, rows, SIZES))
                known = one(int(OFFSETS[b])).bind(SIZES).key_range(b, 0, rows, SIZES)
                assert (lo, hi) == tuple(map(int, known))


def test_far_offsets_and_lengths_are_cut_off():
    far = np.asarray([2**40, -(2**40)])
    assert masks.Causal(far).bind(SIZES).offset.tolist() == [INT32_MAX, -INT32_MAX - 1]
    assert masks.Prefix(far).bind(SIZES).length.tolist() == [INT32_MAX, -INT32_MAX]
    bound = masks.Lengths(far, q=far[::-1]).bind(SIZES)
    assert bound.kv.tolist() == [INT32_MAX, -INT32_MAX]
    assert bound.q.tolist() == [-INT32_MAX, INT32_MAX]
    for offset in (2**40, np.int64(2**40), INT32_MAX, INT32_MAX + 1):
        moved = masks.Window(int(offset) + 1, None, offset).bind(SIZES)
        assert asked(moved, 0).all() == asked(masks.Window(1, None), 0).all()
        assert np.array_equal(asked(moved, 0), AT_K >= AT_Q - 1)
    near = masks.Window(2, 1, np.int32(5)).bind(SIZES)
    assert (near.left, near.right, near.offset) == (2, 1, 5)
    wide = masks.Window(2**40, 2**40, np.int32(5)).bind(SIZES)  # numpy's own sum would overflow
    assert np.asarray(asked(wide, 0)).all()


def test_far_offsets_and_counts_that_cancel_are_exact():
    """By Python's own integers: a whole offset with any count, offsets of entries up to FAR."""
    counts = [None, *(x + d for x in (0, INT32_MAX, 2 * INT32_MAX, 10**30) for d in (0, 1, 3))]
    offsets = [
        s * (x + d)
        for s in (1, -1)
        for x in (0, INT32_MAX, 2 * INT32_MAX, 10**30)
        for d in (-4, -1, 2)
    ]
    for offset in offsets:
        for left in counts:
            for right in (None, 0, INT32_MAX + 2, 2 * INT32_MAX - 1):
                lowest = None if left is None else offset - left
                highest = None if right is None else offset + right
                seen = np.ones((T, S), bool)
                for q, k in np.ndindex(T, S):
                    seen[q, k] = (lowest is None or k - q >= lowest) and (
                        highest is None or k - q <= highest
                    )
                window = masks.Window(left, right, offset).bind(SIZES)
                assert np.array_equal(np.broadcast_to(asked(window, 0), (T, S)), seen)
                if abs(offset) < INT32_MAX:
                    each = masks.Window(left, right, np.asarray([0, offset])).bind(SIZES)
                    assert np.array_equal(np.broadcast_to(asked(each, 1), (T, S)), seen)


def test_wrong_shapes_name_their_class():
    wrong = np.zeros(3, int)
    for make, who in (
        (lambda: masks.Causal(wrong), "Causal.offset"),
        (lambda: masks.Window(1, 1, wrong), "Window.offset"),
        (lambda: scores.Alibi(np.ones(N), wrong), "Alibi.offset"),
    ):
        with pytest.raises(ValueError, match=f"^{who} must broadcast"):
            make().bind(SIZES)
    with pytest.raises(ValueError, match=r"one length; got T=4 and S=6: say Segments"):
        masks.Segments(np.zeros((B, T), int)).bind(SIZES)
    assert masks.Segments(np.zeros((B, T), int)).bind(SIZES._replace(S=T)).kv_ids.shape == (B, T)


def test_a_mask_is_neither_true_nor_an_array():
    with pytest.raises(TypeError, match=r"use &, \| and ~"):
        bool(masks.CAUSAL)
    with pytest.raises(TypeError, match="bias must be an array in this function; got Causal"):
        check_array("bias", masks.CAUSAL)
    for fine in (None, np.ones(2), 1, "text"):
        check_array("bias", fine)


def test_slopes_of_each_entry():
    @jax.jit
    def run(bound, logits):
        heads = np.arange(N)[:, None, None]
        blocks = [bound(logits[b], b, heads, AT_Q[None], AT_K[None]) for b in range(B)]
        return bound.grid(logits, SIZES), blocks

    slopes = np.arange(1.0, B * N + 1).reshape(B, N)
    logits = np.zeros((B, N, T, S))
    for offset in (0, 1, OFFSETS):
        own = np.broadcast_to(offset, B)
        far = np.abs(AT_Q + own[:, None, None] - AT_K)[:, None]  # B 1 T S
        for given in (slopes, slopes[0]):
            whole = np.broadcast_to(given, (B, N))
            want = -whole[..., None, None] * far
            grid, blocks = run(scores.Alibi(given, offset).bind(SIZES), logits)
            assert np.array_equal(grid, want) and np.array_equal(blocks, want)
    several = Sizes((1, B), N, T, S)
    bound = scores.Alibi(slopes[None]).bind(several)
    assert np.array_equal(bound.slopes, slopes)
    square = Sizes((N,), N, T, S)
    assert scores.Alibi(np.ones((N, N))).bind(square).slopes.shape == (N, N)
