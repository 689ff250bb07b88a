"""The plan of one attention in blocks: all that is chosen before any array is looked at."""

from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import numpy as np

from ..._internal.types import Sizes
from ...masks import Mask, Rows
from ...masks.algebra import parts_of
from ...masks.ranges import block_starts, fully_visible_range, runs_of, visible_range
from ...rules import Rules
from ...scores import Additive, Alibi, Identity, Softcap
from ..platform import cores
from ..protocol import is_decode_step

KEY_BLOCK = 512  # keys of a block that few queries look at
MAX_CACHED_LENGTH = 512  # queries and keys, up to which all blocks of a head stay in the cache
MIN_LANE_PAIRS = 2**20  # pairs of all heads, from which on several loops are worth their start
MAX_LANES = 4  # loops, each of which is compiled
MAX_MASK_QUERIES = 256  # times that a static mask is asked what its queries see
LANE_SCORES = Identity | Additive | Alibi | Softcap  # scores of which `lanes` carries all


class Plan(NamedTuple):
    """What is known before any array: sizes, block sizes, and how the blocks are walked.

    Attributes:
      groups: query heads that share a key head.
      rows, cols: queries and keys of a block.
      band: keys that hold all that any block of queries may see, if they are few.
      hides_keys: whether there may be keys that no query sees, whatever stands in them.
      unrolled: whether query blocks are written out one by one, each with its exact keys.
      batched: whether all heads run at once rather than one after the other.
      lanes: how many loops share the heads, side by side on several cores.
      precision: of every product, as the caller had it when he asked.
      few: whether all queries of all heads go over the keys at once, in the forward pass.
      adds: whether gradients stay in float32 or wider, since others are added to them.
      layout: how few queries find keys and values: "tokens first", `B S K H`, as users hand them
        in, or "heads first", `B K S H`, as a cache stores them.
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
    """What a caller may choose of a plan; see `Plan`."""

    rows: int
    cols: int
    unrolled: bool
    batched: bool
    few: bool
    lanes: int


def make_plan(
    sizes: Sizes, key_heads: int, rules: Rules, platform: str, **options: Unpack[PlanOptions]
) -> Plan:
    """The plan for these sizes, of any batch axes, and bound rules; `options` overrule its choices.

    On a CPU one head after the other is quickest on each core. Short sequences are written out, for
    then small blocks waste little on what is hidden, and the shortest run in several loops; long
    ones are walked in loops, in blocks that stay in the second level of cache, and in small ones
    where documents or lengths decide at each call what is looked at.
    Accelerators want large blocks of all heads. Few queries, as beside a cache, go over the keys
    once for all heads, unless `options` asks for other blocks.
    """
    sizes, G = sizes._replace(batch=(sizes.B,)), sizes.N // key_heads
    if not options and is_decode_step(sizes, key_heads):
        options = {"few": True, "cols": KEY_BLOCK}
    if platform != "cpu":
        options = {"rows": 1024, "cols": 1024, "batched": True, **options}
    elif G <= 8 and max(sizes.T, sizes.S) <= 1024:
        rows = _query_block(rules, sizes, G)
        cols = 1024 if G == 1 else 2**18 // (rows * G)
        lanes = _lanes(rules, sizes, key_heads)
        options = {"rows": rows, "cols": cols, "unrolled": True, "lanes": lanes, **options}
    elif _has_dynamic_ranges(rules.mask):
        options = {"rows": max(32, 128 // G), "cols": 128, **options}
    return _plan(sizes, G, rules, options)


def _lanes(rules: Rules, sizes: Sizes, key_heads: int) -> int:
    """How many loops share the heads.

    One where their blocks leave the cache, where `lanes` does not carry all that they compute, on a
    mesh, whose devices share the cores, and where a size is open in `jax.export`.
    """
    plain = rules.mask.is_static and rules.dropout is None and isinstance(rules.score, LANE_SCORES)
    work = sizes.B * sizes.N * sizes.T * sizes.S
    if not plain or max(sizes.T, sizes.S) > MAX_CACHED_LENGTH or not isinstance(work, int):
        return 1
    if work < MIN_LANE_PAIRS or not jax.sharding.get_abstract_mesh().empty:
        return 1
    return min(cores(), MAX_LANES, sizes.B * key_heads)


def _query_block(rules: Rules, sizes: Sizes, G: int) -> int:
    """Queries of a block: the fewer, the less is computed that is hidden, and the more compiled.

    With a head of its own for each query head, three blocks are as quick as four.
    """
    lo, hi = static_fully_visible_range(rules.mask, Rows(0, sizes.T), sizes)
    hides = hi - lo < sizes.S
    few = sizes.T <= 256 or (hides and _band(rules, sizes, 128))
    rows, third = max(32, min(128 if few else 256, 512 // G)), -(-sizes.T // 96) * 32
    return max(rows, third) if hides and not few and G == 1 else rows


def _has_dynamic_ranges(mask: Mask) -> bool:
    """Whether arrays say at each call, as ids and lengths do, which keys a block has to look at."""
    parts = [type(part) for part in parts_of(mask) if not part.is_static]
    return any(part.key_range is not Mask.key_range for part in parts)


def _plan(sizes: Sizes, G: int, rules: Rules, options: PlanOptions) -> Plan:
    most = 512 if sizes.T >= 2048 else 256
    band = _band(rules, sizes, min(128, sizes.T))
    if band is not None:
        most = 128 if band <= 512 else 256
    rows = min(options.get("rows") or max(128, most // G), sizes.T)
    return Plan(
        sizes=sizes,
        groups=G,
        rows=rows,
        cols=min(options.get("cols") or max(most, 2**18 // (rows * G)), sizes.S),
        band=_band(rules, sizes, rows),
        hides_keys=not (rules.mask.is_static and every_key_visible(rules.mask, sizes)),
        unrolled=options.get("unrolled", False),
        batched=options.get("batched", False),
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
        lanes=options.get("lanes", 1),
        few=options.get("few", False),
    )


def _band(rules: Rules, sizes: Sizes, rows: int) -> int | None:
    """The most keys that a block of so many queries may see, if known and at most 1024."""
    starts = block_starts(sizes.T, rows)
    ranges = [static_visible_range(rules.mask, Rows(q, rows), sizes) for q in starts]
    width = max(hi - lo for lo, hi in ranges)
    return width if 0 < width <= min(1024, sizes.S - 1) else None


# What is known of the keys that queries see.


def static_visible_range(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`visible_range`, of what is known before any array is: wider where arrays would narrow it."""
    known = [visible_range(part, 0, rows, sizes) for part in parts_of(mask) if part.is_static]
    return max((lo for lo, _ in known), default=0), min((hi for _, hi in known), default=sizes.S)


def static_fully_visible_range(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`fully_visible_range`, of what is known before any array is."""
    return fully_visible_range(mask, 0, rows, sizes) if mask.is_static else (0, 0)


@lru_cache(maxsize=256)
def every_key_visible(mask: Mask, sizes: Sizes) -> bool:
    """Whether it is certain that every key is seen by some query, for a static mask.

    The runs of keys that queries see are laid one behind another, those that begin first before
    the others: where one begins behind the end of all before it, the keys between are unseen.
    """
    first, end = _runs(mask, sizes)
    order = np.argsort(first, kind="stable")
    reached = np.maximum.accumulate(np.concatenate([[0], end[order]]))
    gaps = np.flatnonzero(first[order] > reached[:-1])
    return bool(reached[gaps[0] if gaps.size else -1] >= sizes.S)


def _runs(mask: Mask, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """First keys and ends of runs that queries are certain to see, for a static mask."""
    runs = runs_of(mask, np.arange(sizes.T, dtype=np.int32)[None])
    if runs is None:  # then queries are asked, each by itself where they are few
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
