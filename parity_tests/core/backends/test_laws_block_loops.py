"""The laws of the loops: which blocks of keys and queries are taken, in what order, how often."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn._internal.types import Sizes
from flax_attn.backends.blockwise.block import Block
from flax_attn.backends.blockwise.block_loops import (
    BLOCK_ALIGNMENT,
    _masked_pieces,
    join_blocks,
    scan_key_blocks,
    scan_query_blocks,
)
from flax_attn.backends.blockwise.plan import (
    BlockPlan,
    make_plan,
    static_fully_visible_range,
    static_visible_range,
)
from flax_attn.masks import (
    CAUSAL,
    FULL,
    Causal,
    Chunked,
    Dense,
    Lengths,
    Mask,
    Rows,
    Segments,
    Window,
)
from flax_attn.masks.ranges import fully_visible_range, visible_range
from flax_attn.rules import Rules

from .law_cases import drawn_masks, normal


class Visit(NamedTuple):
    """A block of keys as the loop handed it out."""

    at: Block
    masked: bool

    @property
    def keys(self) -> list[int]:
        first = self.at.k if self.at.fresh is None else max(self.at.k, self.at.fresh)
        return list(range(first, self.at.k + self.at.cols))


def plan(sizes: Sizes, rows: int, cols: int, **how: Any) -> BlockPlan:
    given = {
        "band": None,
        "hides_keys": True,
        "unrolled": False,
        "batched": False,
        "precision": None,
    }
    return BlockPlan(sizes, 1, rows, cols, **{**given, **how})


def visits(plan: BlockPlan, mask: Mask, at: Block) -> list[Visit]:
    """The blocks of keys for one of queries, in the order in which one program takes them."""

    def step(carry, at, masked):
        assert jnp.result_type(at.k) == jnp.int32
        return written(carry, at.k, -1 if at.fresh is None else at.fresh, at.cols, masked)

    run = jax.jit(lambda mask: scan_key_blocks(plan, mask, at, step, (0, jnp.zeros((9, 4), int))))
    count, rows = run(mask)
    return [
        Visit(at._replace(k=k, fresh=None if fresh < 0 else fresh, cols=cols), bool(masked))
        for k, fresh, cols, masked in rows.tolist()[:count]
    ]


def written(carry: Any, *row: Any) -> Any:
    """A count of rows and a table of them, with one more."""
    count, rows = carry
    return count + 1, rows.at[count].set(jnp.stack([jnp.asarray(x, int) for x in row]))


def ends(mask: Mask, *where: Any) -> list[int]:
    """Of the keys that some of these queries see, and of those that all of them see."""
    ask = jax.jit(lambda mask: (*visible_range(mask, *where), *fully_visible_range(mask, *where)))
    return [int(x) for x in ask(mask)]


def test_pieces_are_all_keys_once_and_masked_only_where_they_must_be():
    ends = [(0, 700), (3, 700), (64, 640), (5, 9), (130, 132), (4, 4), (63, 321)]
    for most, (lo, hi) in itertools.product((64, 100, 256, 1000), ends):
        for sure, until in itertools.product((0, lo, lo + 1, 64, 200, hi, 800), repeat=2):
            found = _masked_pieces(most, lo, hi, sure, until)
            keys = [k for start, count, _ in found for k in range(start, start + count)]
            assert keys == list(range(lo, hi))
            assert all(0 < count <= most for _, count, _ in found)
            bare = {k for start, n, masked in found if not masked for k in range(start, start + n)}
            a, b = min(max(sure, lo), hi), min(until, hi)
            if hi - lo <= most:
                assert len(found) == (hi > lo)
                assert bare == (set(keys) if a == lo and b == hi else set())
                continue
            a = a if a == lo else min(-(-a // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT, hi)
            b = b if b == hi else max(b // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT, lo)
            assert bare == set(range(a, b))
            parts = [(lo, a), (a, max(a, b)), (max(a, b), hi)]
            assert len(found) == sum(-(-(stop - start) // most) for start, stop in parts)


def test_blocks_written_out_are_what_the_queries_see():
    for mask, table, sizes in drawn_masks(5, (6, 8), (7, 5), seed=300):
        if not mask.is_static:
            continue
        for q, rows, cols in ((0, 3, 8), (2, 4, 8), (1, 2, 3)):
            found = visits(plan(sizes, 9, cols, unrolled=True), mask, Block(1, 0, q, 0, 1, rows, 9))
            assert all(v.at.q == q and v.at.rows == rows and v.at.fresh is None for v in found)
            lo, hi = static_visible_range(mask, Rows(q, rows), sizes)
            assert [k for v in found for k in v.keys] == list(range(lo, hi))
            seen = table[:, :, q : q + rows]
            assert {k for v in found for k in v.keys} >= set(np.flatnonzero(seen.any((0, 1, 2))))
            sure, until = static_fully_visible_range(mask, Rows(q, rows), sizes)
            if hi - lo <= cols and found:
                assert found[0].masked == (not (sure <= lo and until >= hi))


def test_blocks_in_loops_are_all_that_the_queries_see():
    for mask, table, sizes in drawn_masks(4, (6, 8), (7, 5), seed=400):
        for q, b, cols in ((0, 0, 3), (2, 1, 3), (jnp.asarray(3), jnp.asarray(1), 2)):
            rows, S = 3, sizes.S
            found = visits(plan(sizes, rows, cols), mask, Block(b, 0, q, 0, 1, rows, cols))
            keys = [k for v in found for k in v.keys]
            assert len(keys) == len(set(keys)) and all(0 <= k < S for k in keys)
            lo, hi, sure, until = ends(mask, int(b), Rows(int(q), rows), sizes)
            assert set(keys) == set(range(lo // cols * cols, min(-(-hi // cols) * cols, S)))
            seen = table[int(b), :, int(q) : int(q) + rows]
            assert set(keys) >= set(np.flatnonzero(seen.any((0, 1))))
            for visit in found:
                first = visit.keys[0]
                assert visit.at.cols == cols and first % cols == 0
                assert visit.masked == (not sure <= first <= first + cols <= until)
                assert (visit.at.fresh is not None) == (visit.masked and S % cols != 0)


def test_a_band_is_one_block_that_holds_all():
    sizes = Sizes((2,), 2, 20, 30)
    for mask in (Window(3, 1), CAUSAL & Window(4, 0), Chunked(4), Window(2, 0, offset=30)):
        seen = np.asarray(mask(0, 0, np.arange(20)[:, None], np.arange(30)))
        for q in (0, 7, jnp.asarray(16)):
            walked = plan(sizes, 4, 5, band=9)
            (visit,) = visits(walked, mask, Block(0, 0, q, 0, 1, 4, 5))
            assert visit.masked and visit.at.fresh is None and visit.at.cols == 9
            assert 0 <= visit.at.k <= 30 - 9
            keys = np.flatnonzero(seen[int(q) : int(q) + 4].any(0))
            assert set(keys) <= set(visit.keys)
            lo = int(visible_range(mask, 0, Rows(q, 4), sizes)[0])
            assert visit.at.k == min(lo, 21)


def loops(mask: Mask, q: Any, sizes: Sizes, cols: int = 4) -> list[str]:
    """The loops and steps that one block of queries is compiled to."""

    def walked(q):
        step = lambda carry, at, masked: carry + (100.0 if masked else 1.0) * at.cols  # noqa: E731
        return scan_key_blocks(plan(sizes, 4, cols), mask, Block(0, 0, q, 0, 1, 4, cols), step, 0.0)

    if isinstance(q, int):
        made = jax.make_jaxpr(lambda: walked(q))()
    else:
        made = jax.make_jaxpr(walked)(q)
    kinds = "while", "scan", "custom_jvp_call"  # the last around a loop with a derivative
    return [str(e.primitive) for e in made.eqns if str(e.primitive) in kinds]


def test_loops_that_are_known_to_be_empty_are_not_compiled():
    even, odd = Sizes((1,), 1, 16, 16), Sizes((1,), 1, 16, 18)
    at = jnp.asarray(8)
    assert len(loops(FULL, at, even)) == 1 and len(loops(FULL, at, odd)) == 2
    assert len(loops(CAUSAL, at, even)) == 2
    assert len(loops(Window(3, 3), at, even)) == 3
    assert len(loops(~FULL, at, even)) == 0
    for mask, want in (
        (CAUSAL, 2),
        (FULL, 1),
        (Causal(1), 2),
        (Window(9, 0), 3),
        (Window(20, 0), 2),
    ):
        assert len(loops(mask, 8, even)) == want, mask
    assert len(loops(Lengths(np.asarray([9])).bind(even), at, even)) == 2
    table = Dense(np.ones((1, 1, 1, 16), bool)).bind(even)
    assert len(loops(table, at, even)) == 1


def test_every_query_is_taken_once_and_stands_where_it_stood():
    for T, rows, unrolled in itertools.product((6, 7), (2, 3), (False, True)):
        walked = plan(Sizes((1,), 2, T, 5), rows, 5, unrolled=unrolled)

        def step(carry, at, new):
            q = jnp.asarray(at.q) + jnp.arange(at.rows)
            rows = jnp.stack([q, 100 + q])  # G rows
            carry = written(carry, at.q, at.rows, -1 if new is None else new)
            return carry, (rows, jnp.stack([rows, -rows], axis=-1))

        run = jax.jit(partial(scan_query_blocks, walked, Block(0, 0, 9, 0, 2, rows, 5), step))
        (count, seen), (line, table) = run((0, jnp.zeros((9, 3), int)))
        assert int(count) == -(-T // rows)
        want = np.stack([np.arange(T), 100 + np.arange(T)])
        assert np.array_equal(line, want)
        assert np.array_equal(table, np.stack([want, -want], axis=-1))
        for i, (q, n, new) in enumerate(seen.tolist()[:count]):
            if unrolled:
                assert (q, n, new) == (i * rows, min(rows, T - i * rows), -1)
            else:
                assert (q, n) == (min(i * rows, T - rows), rows)
                assert new == (i * rows if T % rows else -1)


def test_queries_in_loops_are_one_scan():
    walked = plan(Sizes((1,), 1, 12, 5), 4, 5)

    def step(x, carry, at, new):
        return carry + 1, x[None] + (at.q + jnp.zeros((1, 4), at.q.dtype)).astype(x.dtype)

    def run(x):
        return scan_query_blocks(walked, Block(0, 0, 0, 0, 1, 4, 5), partial(step, x), 0)

    made = jax.make_jaxpr(run)(jnp.zeros(4, int))
    (scan,) = (e for e in made.eqns if str(e.primitive) == "scan")
    assert scan.params["length"] == 3
    with jax.enable_x64(True):
        made = str(jax.make_jaxpr(run)(jnp.zeros(4, "int64")))
        assert "i32[3]" in made


def test_blocks_are_joined_where_the_last_reaches_back():
    x = normal(0, 2, 11, 3)
    for rows in (3, 4, 11):
        starts = [min(i, 11 - rows) for i in range(0, 11, rows)]
        blocks = np.stack([x[:, q : q + rows] for q in starts])
        joined = jax.jit(join_blocks, static_argnums=1)(blocks, 11)
        assert np.array_equal(joined, x.astype("float32"))


# The plan: what follows from the request, whatever sizes are chosen.


RULES = {
    "full": Rules(),
    "causal": Rules(CAUSAL),
    "far": Rules(Causal(1000)),
    "window": Rules(Window(3, 0)),
    "wide window": Rules(Window(20, 20)),
    "chunks": Rules(Chunked(8)),
    "lengths": Rules(Lengths(np.asarray([3, 9]))),
    "documents": Rules(Segments(q_ids=np.zeros((2, 48), int), kv_ids=np.zeros((2, 60), int))),
}


def made(name: str, platform: str, N: int = 4, T: int = 48, S: int = 60, K: int = 2, **how: Any):
    sizes = Sizes((2,), N, T, S)
    return make_plan(sizes, K, RULES[name].bind(sizes, 4), platform, **how), sizes


def test_a_plan_fits_its_request():
    for name, platform in itertools.product(RULES, ("cpu", "gpu", "tpu")):
        for how in ({}, {"rows": 5, "cols": 7}, {"rows": 500, "cols": 700}, {"unrolled": True}):
            plan, sizes = made(name, platform, **how)
            assert plan.sizes == sizes and plan.groups == 2
            assert 0 < plan.rows <= 48 and 0 < plan.cols <= 60
            assert plan.rows == min(how.get("rows", plan.rows), 48)
            assert plan.cols == min(how.get("cols", plan.cols), 60)
            assert plan.unrolled == (how.get("unrolled", False) or platform == "cpu")
            assert plan.batched == (platform != "cpu")
            assert isinstance(hash(plan), int) and plan.precision is None
    assert made("full", "cpu", N=18, K=2)[0].unrolled is False
    assert made("full", "cpu", N=16, K=2)[0].groups == 8 and made("full", "cpu", K=4)[0].groups == 1
    assert made("causal", "gpu", batched=False)[0].batched is False
    assert made("causal", "cpu", batched=True)[0].batched is True
    assert made("causal", "cpu", unrolled=False)[0].unrolled is False
    long = made("full", "gpu", T=3000, S=3000)[0]
    assert (long.rows, long.cols) == (1024, 1024)
    for T, S, unrolled in ((1024, 1024, True), (1025, 8, False), (8, 1025, False)):
        assert made("full", "cpu", T=T, S=S)[0].unrolled is unrolled
    with jax.default_matmul_precision("highest"):
        assert made("full", "cpu")[0].precision == "highest"


def test_a_plan_knows_where_keys_may_be_hidden():
    want = {"full": False, "far": False, "wide window": False}  # by somebody each key is seen
    for name in RULES:
        assert made(name, "cpu")[0].hides_keys == want.get(name, True), name


def test_a_band_is_the_most_that_a_block_of_queries_sees():
    def most(mask: Mask, rows: int, T: int, S: int) -> int:
        seen = np.broadcast_to(mask(0, 0, np.arange(T)[:, None], np.arange(S)), (T, S))
        starts = [min(q, T - rows) for q in range(0, T, rows)]
        ends = [np.flatnonzero(seen[q : q + rows].any(0)) for q in starts]
        return max(int(x[-1] - x[0] + 1) if len(x) else 0 for x in ends)

    for (T, S), rows in itertools.product(((48, 60), (30, 90)), (4, 7, 30)):
        for mask in (Window(3, 0), Window(5, 5), Chunked(8), Window(20, 20), Window(0, 0, 3)):
            rules = Rules(mask).bind(Sizes((1,), 1, T, S), 4)
            found = make_plan(Sizes((1,), 1, T, S), 1, rules, "tpu", rows=rows).band
            width = most(mask, rows, T, S)
            assert found == (width if width < S else None), (mask, rows)
    for mask in (FULL, ~FULL, Causal(1000)):
        assert make_plan(Sizes((1,), 1, 48, 60), 1, Rules(mask), "tpu", rows=8).band is None
    for left, band in ((1023 - 8, 1023), (1023 - 7, 1024), (1023 - 6, None)):
        rules = Rules(Window(left, 0))
        assert make_plan(Sizes((1,), 1, 4096, 4096), 1, rules, "tpu", rows=8).band == band
    for S, band in ((33, 32), (32, None)):
        rules = Rules(Window(S - 8 if band is None else 24, 0))
        assert make_plan(Sizes((1,), 1, 40, S), 1, rules, "tpu", rows=8).band == band
