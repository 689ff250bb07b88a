"""Which keys a block of queries may see at most, and which all of its queries see for certain.

A range is asked for a block of known size from a query that may be traced, and is one formula for
numbers and for traced numbers: what a plan measures of a static mask is what its loops run over.
"""

from functools import lru_cache, singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._arrays import clip, larger, of_entry, pick, smaller
from ..._types import Sizes
from ...masks import And, Causal, Chunked, Full, Lengths, Mask, Not, Or, Prefix, Segments, Window

Range = tuple[Any, Any]


class Rows(NamedTuple):
    """Queries from `start`, which may be traced; as many as `size`, which is a number."""

    start: Any
    size: int

    @property
    def ends(self) -> Range:
        """The first query, and the one after the last."""
        return self.start, self.start + self.size


@singledispatch
def outer(mask: Mask, b: Any, rows: Rows, sizes: Sizes) -> Range:
    """`lo, hi`: no query of `rows` may look at a key outside."""
    lo, hi = mask.key_range(b, 0, rows.ends, sizes)
    return clip(lo, sizes.S), clip(hi, sizes.S)


@outer.register
def _(mask: And, b, rows, sizes):
    one, two = outer(mask.a, b, rows, sizes), outer(mask.b, b, rows, sizes)
    return larger(one[0], two[0]), smaller(one[1], two[1])


@outer.register
def _(mask: Or, b, rows, sizes):
    one, two = outer(mask.a, b, rows, sizes), outer(mask.b, b, rows, sizes)
    none, other = one[0] >= one[1], two[0] >= two[1]  # an empty range may lie anywhere
    lo = pick(none, two[0], pick(other, one[0], smaller(one[0], two[0])))
    return lo, pick(none, two[1], pick(other, one[1], larger(one[1], two[1])))


@outer.register
def _(mask: Not, b, rows, sizes):
    """What is hidden at one end is cut off; a hole in the middle is not."""
    lo, hi = inner(mask.a, b, rows, sizes)
    some, S = lo < hi, sizes.S
    return pick(some & (lo <= 0), hi, 0), pick(some & (hi >= S), lo, S)


@outer.register
def _(mask: Lengths, b, rows, sizes):
    hi = mask.key_range(b, 0, rows.ends, sizes)[1]
    return 0, hi if mask.q is None else jnp.where(rows.start < of_entry(mask.q, b), hi, 0)


@outer.register
def _(mask: Segments, b, rows, sizes):
    """From the first to the last key whose segment lies among those of the queries."""
    lo, hi, _ = _of_segments(mask, b, rows, sizes)
    return lo, hi


@singledispatch
def inner(mask: Mask, b: Any, rows: Rows, sizes: Sizes) -> Range:
    """`lo, hi`: every query of `rows` may look at every key inside. Conservative."""
    return 0, 0


@inner.register
def _(mask: Full, b, rows, sizes):
    return 0, sizes.S


@inner.register
def _(mask: Causal, b, rows, sizes):
    return 0, clip(rows.start + of_entry(mask.offset, b) + 1, sizes.S)


@inner.register
def _(mask: Window, b, rows, sizes):
    first, last = (q + of_entry(mask.offset, b) for q in (rows.start, rows.ends[1] - 1))
    lo = 0 if mask.left is None else clip(last - mask.left, sizes.S)
    return lo, sizes.S if mask.right is None else clip(first + mask.right + 1, sizes.S)


@inner.register
def _(mask: Chunked, b, rows, sizes):
    one, two = rows.start // mask.size, (rows.ends[1] - 1) // mask.size
    lo, hi = two * mask.size, (one + 1) * mask.size  # empty unless they are one chunk
    return clip(lo, sizes.S), clip(hi, sizes.S)


@inner.register
def _(mask: Prefix, b, rows, sizes):
    return 0, clip(of_entry(mask.length, b), sizes.S)


@inner.register
def _(mask: Lengths, b, rows, sizes):
    hi = clip(of_entry(mask.kv, b), sizes.S)
    return 0, hi if mask.q is None else jnp.where(rows.ends[1] <= of_entry(mask.q, b), hi, 0)


@inner.register
def _(mask: Segments, b, rows, sizes):
    """The keys of the segment, if the queries are of one and its keys stand together."""
    lo, hi, whole = _of_segments(mask, b, rows, sizes)
    return pick(whole, lo, 0), pick(whole, hi, 0)


@inner.register
def _(mask: And, b, rows, sizes):
    one, two = inner(mask.a, b, rows, sizes), inner(mask.b, b, rows, sizes)
    return larger(one[0], two[0]), smaller(one[1], two[1])


@inner.register
def _(mask: Or, b, rows, sizes):
    return _longer(inner(mask.a, b, rows, sizes), inner(mask.b, b, rows, sizes))


@inner.register
def _(mask: Not, b, rows, sizes):
    """What lies before all that the other may show, or behind it, whichever is more."""
    lo, hi = outer(mask.a, b, rows, sizes)
    lo, hi = pick(lo < hi, lo, sizes.S), pick(lo < hi, hi, sizes.S)
    return _longer((0, lo), (hi, sizes.S))


def _longer(one: Range, two: Range) -> Range:
    first = one[1] - one[0] >= two[1] - two[0]
    return pick(first, one[0], two[0]), pick(first, one[1], two[1])


def _of_segments(mask: Segments, b: Any, rows: Rows, sizes: Sizes) -> tuple[Any, Any, Any]:
    """The run that holds all keys of the queries' segments, and whether it is of one segment."""
    mine = jax.lax.dynamic_slice_in_dim(mask.q_ids[b], rows.start, rows.size)
    keys, least, most = mask.kv_ids[b], mine.min(), mine.max()
    found = (keys >= least) & (keys <= most)
    some = found.any()
    lo = jnp.where(some, jnp.argmax(found), sizes.S).astype(jnp.int32)
    hi = jnp.where(some, sizes.S - jnp.argmax(found[::-1]), 0).astype(jnp.int32)
    return lo, hi, (least == most) & (found.sum(dtype=jnp.int32) == hi - lo)


def static_outer(mask: Mask, rows: Rows, sizes: Sizes) -> tuple[int, int]:
    """`outer`, of what is known before any array is: wider where arrays would narrow it."""
    if isinstance(mask, And):
        one, two = static_outer(mask.a, rows, sizes), static_outer(mask.b, rows, sizes)
        return max(one[0], two[0]), min(one[1], two[1])
    return outer(mask, 0, rows, sizes) if mask.is_static else (0, sizes.S)


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
