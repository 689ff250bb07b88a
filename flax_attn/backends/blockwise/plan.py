"""Plan of a blockwise attention: everything that is decided at trace time."""

from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import numpy as np

from ..._internal.types import Sizes
from ...masks import FULL, Mask, Rows
from ...masks.algebra import And, parts_of
from ...masks.ranges import block_starts, fully_visible_range, runs_of, visible_range
from ...rules import Rules
from ...scores import Additive, Alibi, Identity, Softcap
from ...where import cores
from ..protocol import is_decode_step

KEY_BLOCK = 512  # keys of a block in decoding
MAX_CACHED_LENGTH = 512  # queries or keys, up to which a head's blocks fit in the processor's cache
MIN_LANE_PAIRS = 2**20  # query-key pairs of all heads, from which parallel loops pay off
MAX_LANES = 4  # parallel loops; each is compiled
MAX_MASK_QUERIES = 256  # ranges of queries for which a static mask is evaluated
LANE_SCORES = Identity | Additive | Alibi | Softcap  # scores whose intermediates `lanes` carries


class BlockPlan(NamedTuple):
    """Static facts: sizes, block sizes, and how the blocks are iterated.

    Attributes:
      groups: query heads that share a key head.
      rows, cols: queries and keys of a block.
      band: number of keys that covers what any query block sees, if it is small.
      hides_keys: whether some keys may be masked for all queries; they may hold NaN.
      unrolled: whether query blocks are unrolled, each with its exact keys.
      batched: whether all heads run at once instead of one after the other.
      lanes: number of parallel loops that divide the heads, on several cores.
      precision: of every product: `jax_default_matmul_precision` at the call.
      few: whether the forward pass is the one for decoding, with all heads in one loop over keys.
      adds: whether gradients stay in float32 or wider, because others are added to them.
      layout: of keys and values in decoding: "tokens first", `B S K H`, as callers pass them, or
        "heads first", `B K S H`, as a cache stores them.
    """

    sizes: Sizes
    groups: int
    rows: int
    cols: int
    band: int | None
    hides_keys: bool
    unrolled: bool
    batched: bool
    precision: Any
    lanes: int = 1
    few: bool = False
    adds: bool = False
    layout: Literal["tokens first", "heads first"] = "tokens first"


class PlanOptions(TypedDict, total=False):
    """Fields of a plan that a caller may set; see `BlockPlan`."""

    rows: int
    cols: int
    unrolled: bool
    batched: bool
    few: bool
    lanes: int


def make_plan(
    sizes: Sizes, key_heads: int, rules: Rules, platform: str, **options: Unpack[PlanOptions]
) -> BlockPlan:
    """The plan for these sizes, of any batch axes, and bound rules; `options` override its choices.

    On a CPU one head after the other is fastest. Short sequences are unrolled, because small blocks
    then waste little work on masked pairs, and the shortest run in parallel loops. Long ones run in
    loops, in blocks that fit in the L2 cache, or in small blocks where documents or lengths decide
    at run time which keys are visible. Accelerators need large blocks of all heads. In decoding one
    pass over the keys serves all heads, unless `options` sets other blocks.
    """
    sizes, G = sizes._replace(batch=(sizes.B,)), sizes.N // key_heads
    static = tuple(part for part in parts_of(rules.mask) if part.is_static)
    if not options and is_decode_step(sizes, key_heads):
        options = {"few": True, "cols": KEY_BLOCK}
    if platform != "cpu":
        options = {"rows": 1024, "cols": 1024, "batched": True, **options}
    elif G <= 8 and max(sizes.T, sizes.S) <= 1024:
        rows = _query_block(rules.mask, static, sizes, G)
        cols = 1024 if G == 1 else 2**18 // (rows * G)
        lanes = _lanes(rules, sizes, key_heads)
        options = {"rows": rows, "cols": cols, "unrolled": True, "lanes": lanes, **options}
    elif _has_dynamic_ranges(rules.mask):
        options = {"rows": max(32, 128 // G), "cols": 128, **options}
    return _plan(sizes, G, rules, static, options)


def _lanes(rules: Rules, sizes: Sizes, key_heads: int) -> int:
    """Number of parallel loops that divide the heads.

    One if a head's blocks do not fit in the cache, if `lanes` cannot carry all intermediates, on a
    mesh, whose devices share the cores, and if `jax.export` left a size symbolic.
    """
    plain = rules.mask.is_static and rules.dropout is None and isinstance(rules.score, LANE_SCORES)
    work = sizes.B * sizes.N * sizes.T * sizes.S
    if not plain or max(sizes.T, sizes.S) > MAX_CACHED_LENGTH or not isinstance(work, int):
        return 1
    if work < MIN_LANE_PAIRS or not jax.sharding.get_abstract_mesh().empty:
        return 1
    return min(cores(), MAX_LANES, sizes.B * key_heads)


def _query_block(mask: Mask, static: tuple[Mask, ...], sizes: Sizes, G: int) -> int:
    """Queries of a block: smaller blocks compute fewer masked pairs, but compile longer.

    With one key head per query head, three blocks are as fast as four.
    """
    lo, hi = static_fully_visible_range(mask, Rows(0, sizes.T), sizes)
    hides = hi - lo < sizes.S
    few = sizes.T <= 256 or (hides and _band(static, sizes, 128))
    rows, third = max(32, min(128 if few else 256, 512 // G)), -(-sizes.T // 96) * 32
    return max(rows, third) if hides and not few and G == 1 else rows


def _has_dynamic_ranges(mask: Mask) -> bool:
    """Whether the visible keys of a block depend on arrays such as ids or lengths."""
    parts = [type(part) for part in parts_of(mask) if not part.is_static]
    return any(part.key_range is not Mask.key_range for part in parts)


def _plan(
    sizes: Sizes, G: int, rules: Rules, static: tuple[Mask, ...], options: PlanOptions
) -> BlockPlan:
    most = 512 if sizes.T >= 2048 else 256
    band = _band(static, sizes, min(128, sizes.T))
    if band is not None:
        most = 128 if band <= 512 else 256
    rows = min(options.get("rows") or max(128, most // G), sizes.T)
    return BlockPlan(
        sizes=sizes,
        groups=G,
        rows=rows,
        cols=min(options.get("cols") or max(most, 2**18 // (rows * G)), sizes.S),
        band=_band(static, sizes, rows),
        hides_keys=not (rules.mask.is_static and every_key_visible(rules.mask, sizes)),
        unrolled=options.get("unrolled", False),
        batched=options.get("batched", False),
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
        lanes=options.get("lanes", 1),
        few=options.get("few", False),
    )


@lru_cache(maxsize=256)
def _band(static: tuple[Mask, ...], sizes: Sizes, rows: int) -> int | None:
    """Largest number of keys visible to a block of `rows` queries, if static and at most 1024."""
    blocks = [Rows(q, rows) for q in block_starts(sizes.T, rows)]
    ranges = [static_visible_range(reduce(And, static, FULL), block, sizes) for block in blocks]
    width = max(hi - lo for lo, hi in ranges)
    return width if 0 < width <= min(1024, sizes.S - 1) else None


# Static bounds of the visible keys.


def static_visible_range(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`visible_range` from static masks alone; arrays could only narrow it."""
    # Parts of an `&` each narrow the range; those with arrays are left out.
    known = [visible_range(part, 0, rows, sizes) for part in parts_of(mask) if part.is_static]
    return max((lo for lo, _ in known), default=0), min((hi for _, hi in known), default=sizes.S)


def static_fully_visible_range(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`fully_visible_range` if the mask is static, else an empty range."""
    return fully_visible_range(mask, 0, rows, sizes) if mask.is_static else (0, 0)


@lru_cache(maxsize=256)
def every_key_visible(mask: Mask, sizes: Sizes) -> bool:
    """Whether every key is certain to be visible to some query, for a static mask.

    The visible ranges are sorted by their first key: where one begins after the end of all ranges
    before it, the keys between are masked.
    """
    first, end = _runs(mask, sizes)
    order = np.argsort(first, kind="stable")
    reached = np.maximum.accumulate(np.concatenate([[0], end[order]]))
    gaps = np.flatnonzero(first[order] > reached[:-1])
    return bool(reached[gaps[0] if gaps.size else -1] >= sizes.S)


def _runs(mask: Mask, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """First keys and ends of the ranges that queries are certain to see, for a static mask."""
    runs = runs_of(mask, np.arange(sizes.T, dtype=np.int32)[None])
    if runs is None:  # no closed form: evaluate the mask for at most MAX_MASK_QUERIES ranges
        rows = max(1, sizes.T // MAX_MASK_QUERIES)
        ranges = [
            fully_visible_range(mask, 0, Rows(t, rows), sizes)
            for t in range(0, sizes.T - rows + 1, rows)
        ]
        first, end = np.asarray(ranges).T
    else:
        ends = (0 if runs[0] is None else runs[0], sizes.S if runs[1] is None else runs[1])
        first, end = (np.broadcast_to(np.asarray(x).reshape(-1), sizes.T) for x in ends)
    some = first < end
    return np.clip(first[some], 0, sizes.S), np.clip(end[some], 0, sizes.S)
