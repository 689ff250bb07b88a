"""The plan of one attention in blocks: all that is chosen before any array is looked at."""

from typing import Any, NamedTuple

import jax

from ..._types import Sizes
from ...rules import Rules
from .ranges import all_seen, inner, outer


class Plan(NamedTuple):
    """What is known before any array: sizes, block sizes, and how the blocks are walked.

    Attributes:
      groups: query heads that share a key head.
      rows, cols: queries and keys of a block.
      band: keys that hold all that any block of queries may see, if they are few.
      quiet: whether there may be keys that no query sees, whatever stands in them.
      unrolled: whether query blocks are written out one by one, each with its exact keys.
      batched: whether all heads run at once rather than one after the other.
      precision: of every product, as the caller had it when he asked.
    """

    sizes: Sizes
    groups: int
    rows: int
    cols: int
    band: int | None
    quiet: bool
    unrolled: bool
    batched: bool
    precision: Any


class Plans(NamedTuple):
    """How the forward pass walks, and how the backward pass does."""

    forward: Plan
    backward: Plan


def plans_of(sizes: Sizes, key_heads: int, rules: Rules, **how: Any) -> Plans:
    """The plans for these sizes and bound rules on this platform; `how` overrules their choices.

    On a CPU one head after the other is quickest, in blocks that stay in the second level of
    cache; unrolling pays in the backward pass of short sequences. Accelerators want large blocks
    of all heads.
    """
    G = sizes.N // key_heads
    forward, backward = how, how
    if jax.default_backend() != "cpu":
        large = {"rows": 1024, "cols": 1024, "batched": True}
        forward = backward = {**large, **how}
    elif sizes.T <= 1024 and G <= 2 and _is_static(rules, sizes):
        rows = 128 if sizes.T <= 512 else 256
        forward = {"rows": 256, "cols": 128, **how}
        backward = {"rows": rows, "cols": 1024, "unrolled": True, **how}
    return Plans(*(_plan(sizes, G, rules, **given) for given in (forward, backward)))


def _plan(sizes: Sizes, G: int, rules: Rules, rows: int = 0, cols: int = 0, **how: bool) -> Plan:
    narrow = _band(rules, sizes, min(256, sizes.T))
    most = 512 if narrow is None and sizes.T >= 2048 else 256
    rows = min(rows or max(128, most // G), sizes.T)
    return Plan(
        sizes=sizes,
        groups=G,
        rows=rows,
        cols=min(cols or max(most, 2**18 // (rows * G)), sizes.S),
        band=_band(rules, sizes, rows),
        quiet=not (rules.mask.is_static and all_seen(rules.mask, sizes)),
        unrolled=how.get("unrolled", False),
        batched=how.get("batched", False),
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
    )


def _is_static(rules: Rules, sizes: Sizes) -> bool:
    ranges = (*outer(rules.mask, 0, (0, 1), sizes), *inner(rules.mask, 0, (0, 1), sizes))
    return all(isinstance(x, int) for x in ranges)


def _band(rules: Rules, sizes: Sizes, rows: int) -> int | None:
    """The most keys that a block of so many queries may see, if static and at most 1024."""
    if not rules.mask.is_static:
        return None
    starts = [min(q, sizes.T - rows) for q in range(0, sizes.T, rows)]
    ranges = [outer(rules.mask, 0, (q, q + rows), sizes) for q in starts]
    if not all(isinstance(x, int) for ends in ranges for x in ends):
        return None
    width = max(hi - lo for lo, hi in ranges)
    return width if 0 < width <= min(1024, sizes.S - 1) else None
