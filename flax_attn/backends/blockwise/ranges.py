"""Which keys a block of queries may see at most, and which all of its queries see for certain.

A range is asked for a block of known size from a query that may be traced, and is one formula for
numbers and for traced numbers: what a plan measures of a static mask is what its loops run over.
"""

from functools import lru_cache
from typing import Any

from ..._types import Sizes
from ...masks import Mask, Rows
from ...masks.algebra import Range, parts_of, within


def outer(mask: Mask, b: Any, rows: Rows, sizes: Sizes) -> Range:
    """`lo, hi`: no query of `rows`, of any head, may look at a key outside."""
    return within(mask.key_range(b, 0, rows, sizes), sizes)


def inner(mask: Mask, b: Any, rows: Rows, sizes: Sizes) -> Range:
    """`lo, hi`: every query of `rows`, of every head, may look at every key inside."""
    return within(mask.seen_range(b, 0, rows, sizes), sizes)


def static_outer(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`outer`, of what is known before any array is: wider where arrays would narrow it."""
    known = [outer(part, 0, rows, sizes) for part in parts_of(mask) if part.is_static]
    return max((lo for lo, _ in known), default=0), min((hi for _, hi in known), default=sizes.S)


def static_inner(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`inner`, of what is known before any array is."""
    return inner(mask, 0, rows, sizes) if mask.is_static else (0, 0)


@lru_cache(maxsize=256)
def all_seen(mask: Mask, sizes: Sizes) -> bool:
    """Whether it is certain that every key is seen by some query, for a static mask."""
    reached = 0
    for t in (sizes.T - 1, *range(sizes.T)):  # the last query alone will often do
        lo, hi = inner(mask, 0, Rows(t, 1), sizes)
        if lo <= reached:
            reached = max(reached, hi)
        if reached == sizes.S:
            return True
    return False
