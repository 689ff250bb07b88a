"""What is known of the keys that queries see before any array is, for the plan of a request."""

from functools import lru_cache

from ..._types import Sizes
from ...masks import Mask, Rows
from ...masks.algebra import parts_of
from ...masks.answers import inner, outer


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
