"""Which keys a block of queries may see at most, and which all of its queries see for certain."""

from functools import lru_cache, singledispatch
from typing import Any

import jax
import jax.numpy as jnp

from ..._arrays import clip, larger, smaller
from ..._types import Sizes
from ...masks import And, Causal, Chunked, Full, Lengths, Mask, Not, Or, Prefix, Segments, Window

Range = tuple[Any, Any]


@singledispatch
def outer(mask: Mask, b: Any, q: Range, sizes: Sizes) -> Range:
    """`lo, hi`: no query of `range(*q)` may look at a key outside."""
    lo, hi = mask.key_range(b, 0, q, sizes)
    return _clipped(lo, hi, sizes)


@outer.register
def _(mask: And, b, q, sizes):
    one, two = outer(mask.a, b, q, sizes), outer(mask.b, b, q, sizes)
    return larger(one[0], two[0]), smaller(one[1], two[1])


@outer.register
def _(mask: Or, b, q, sizes):
    one, two = outer(mask.a, b, q, sizes), outer(mask.b, b, q, sizes)
    return smaller(one[0], two[0]), larger(one[1], two[1])


@outer.register
def _(mask: Not, b, q, sizes):
    lo, hi = inner(mask.a, b, q, sizes)
    # What is hidden at one end alone is cut off; both ends or none cannot be told while traced.
    if not (isinstance(lo, int) and isinstance(hi, int)):
        return 0, sizes.S
    if lo >= hi:
        return 0, sizes.S
    return hi if lo == 0 else 0, lo if hi == sizes.S else sizes.S


@outer.register
def _(mask: Segments, b, q, sizes):
    """From the first to the last key whose segment lies among those of the queries."""
    width = q[1] - q[0]
    if sizes.S == 0 or not isinstance(width, int):
        return 0, sizes.S
    mine = jax.lax.dynamic_slice(mask.q_ids[b], (q[0],), (width,))
    keys = mask.kv_ids[b]
    found = (keys >= mine.min()) & (keys <= mine.max())
    lo = jnp.where(found.any(), jnp.argmax(found), sizes.S)
    hi = jnp.where(found.any(), sizes.S - jnp.argmax(found[::-1]), 0)
    return lo.astype(jnp.int32), hi.astype(jnp.int32)


@singledispatch
def inner(mask: Mask, b: Any, q: Range, sizes: Sizes) -> Range:
    """`lo, hi`: every query of `range(*q)` may look at every key inside. Conservative."""
    return 0, 0


@inner.register
def _(mask: Full, b, q, sizes):
    return 0, sizes.S


@inner.register
def _(mask: Causal, b, q, sizes):
    return 0, clip(q[0] + mask.offset + 1, sizes.S)


@inner.register
def _(mask: Window, b, q, sizes):
    lo = 0 if mask.left is None else q[1] - 1 + mask.offset - mask.left
    hi = sizes.S if mask.right is None else q[0] + mask.offset + mask.right + 1
    return clip(lo, sizes.S), clip(hi, sizes.S)


@inner.register
def _(mask: Chunked, b, q, sizes):
    one, two = q[0] // mask.size, (q[1] - 1) // mask.size
    lo, hi = two * mask.size, (one + 1) * mask.size  # empty unless they are one chunk
    return clip(lo, sizes.S), clip(hi, sizes.S)


@inner.register
def _(mask: Prefix, b, q, sizes):
    return 0, mask.key_range(b, 0, q, sizes)[1]


@inner.register
def _(mask: Lengths, b, q, sizes):
    hi = mask.key_range(b, 0, q, sizes)[1]
    return 0, hi if mask.q is None else jnp.where(q[1] <= jnp.asarray(mask.q)[b], hi, 0)


@inner.register
def _(mask: And, b, q, sizes):
    one, two = inner(mask.a, b, q, sizes), inner(mask.b, b, q, sizes)
    return larger(one[0], two[0]), smaller(one[1], two[1])


@inner.register
def _(mask: Or, b, q, sizes):
    one, two = inner(mask.a, b, q, sizes), inner(mask.b, b, q, sizes)
    if all(isinstance(x, int) for x in (*one, *two)):
        return max(one, two, key=lambda r: r[1] - r[0])
    first = one[1] - one[0] >= two[1] - two[0]
    return jnp.where(first, one[0], two[0]), jnp.where(first, one[1], two[1])


@inner.register
def _(mask: Not, b, q, sizes):
    lo, hi = outer(mask.a, b, q, sizes)
    if isinstance(lo, int) and isinstance(hi, int) and lo >= hi:
        return 0, sizes.S
    return 0, 0


def reach(mask: Mask, q: Range, sizes: Sizes) -> tuple[int, int]:
    """`outer`, of what is known before any array is: wider where arrays would narrow it."""
    if isinstance(mask, And):
        one, two = reach(mask.a, q, sizes), reach(mask.b, q, sizes)
        return max(one[0], two[0]), min(one[1], two[1])
    return outer(mask, 0, q, sizes) if mask.is_static else (0, sizes.S)


def sure(mask: Mask, q: Range, sizes: Sizes) -> tuple[int, int]:
    """`inner`, of what is known before any array is."""
    return inner(mask, 0, q, sizes) if mask.is_static else (0, 0)


@lru_cache(maxsize=256)
def all_seen(mask: Mask, sizes: Sizes) -> bool:
    """Whether it is certain that every key is seen by some query, for a static mask."""
    reached = 0
    for t in (sizes.T - 1, *range(sizes.T)):  # the last query alone will often do
        lo, hi = inner(mask, 0, (t, t + 1), sizes)
        if lo <= reached:
            reached = max(reached, hi)
        if reached == sizes.S:
            return True
    return False


def _clipped(lo: Any, hi: Any, sizes: Sizes) -> Range:
    return clip(lo, sizes.S), clip(hi, sizes.S)
