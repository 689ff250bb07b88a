"""Validated access to what masks report about themselves: key ranges, bands and segments.

Users may override the methods of a mask. Backends and combined masks call them only through the
functions here. Results of a static mask become Python ints, however they were computed, so that
plans and loops use the same values. A result of the wrong form raises a TypeError that names the
class and the method.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._internal.arrays import clip, dtype_of, is_integer, minimum
from .._internal.types import Sizes

Range = tuple[Any, Any]
TRACED = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.ConcretizationTypeError,  # includes TracerBoolConversionError
)


class Rows(tuple):
    """A block of queries as the pair (first, one past the last); `start` may be traced.

    Attributes:
      size: number of queries, static even if the pair is traced.
      length: total number of queries if they are split into blocks of `size`, the last of which
        may overlap the one before; None if the block may start anywhere.
    """

    size: int
    length: int | None

    def __new__(cls, start: Any, size: int, length: int | None = None) -> "Rows":
        rows = super().__new__(cls, (start, start + size))
        rows.size, rows.length = size, length
        return rows


class Band(NamedTuple):
    """`lo <= k - q <= hi`, `k < kv` and `q < rows`; None for no bound.

    Returned by a mask's `as_band` if this describes the mask completely. Raises nothing.

    Args:
      lo, hi: ints.
      kv, rows: ints, or arrays with one per batch entry.

    Source: the lengths and windows that the kernels of cuDNN take.

    >>> from flax_attn import CAUSAL, Window
    >>> (CAUSAL & Window(3, 3)).as_band()
    Band(lo=-3, hi=0, kv=None, rows=None)
    """

    lo: int | None = None
    hi: int | None = None
    kv: Any = None
    rows: Any = None

    def combine(self, other: "Band") -> "Band":
        """The intersection of both bands."""
        return Band(*map(combine, (max, min, minimum, minimum), self, other))


def combine(choose: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """`choose(a, b)`, or the other one if one is None."""
    return b if a is None else a if b is None else choose(a, b)


# Ranges.


def visible_range(mask: Any, b: Any, q: Range, sizes: Sizes) -> Range:
    """`lo, hi`: no query of `range(*q)`, in any head, attends to a key outside."""
    return _range("key_range", mask, b, q, sizes)


def fully_visible_range(mask: Any, b: Any, q: Range, sizes: Sizes) -> Range:
    """`lo, hi`: every query of `range(*q)`, in every head, attends to every key inside."""
    return _range("seen_range", mask, b, q, sizes)


def block_starts(length: int, size: int) -> list[int]:
    """Starts of blocks of `size` that cover `length`; the last one ends at `length`."""
    return [min(start, length - size) for start in range(0, length, size)]


def _range(method: str, mask: Any, b: Any, q: Range, sizes: Sizes) -> Range:
    if not (isinstance(q, Rows) and mask.is_static):
        return _clipped(mask, method, _evaluate(mask, method, b, 0, q, sizes), sizes)
    if is_integer(q[0]):
        return _known_range(method, mask, int(q[0]), q.size, sizes)
    if q.length is None:
        return _clipped(mask, method, _evaluate(mask, method, 0, 0, q, sizes), sizes)
    block = (q[0] + q.size - 1) // q.size  # rounded up, since the last start need not be a multiple
    ends = zip(*_known_ranges(method, mask, q.length, q.size, sizes), strict=True)
    lo, hi = (_of_block(of_blocks, block) for of_blocks in ends)
    return lo, hi


@lru_cache(maxsize=2048)
def _known_range(method: str, mask: Any, start: int, size: int, sizes: Sizes) -> tuple[int, int]:
    with jax.ensure_compile_time_eval():
        answer = _evaluate(mask, method, 0, 0, Rows(start, size), sizes)
        lo, hi = _clipped(mask, method, answer, sizes)
        return int(lo), int(hi)


@lru_cache(maxsize=256)
def _known_ranges(
    method: str, mask: Any, length: int, size: int, sizes: Sizes
) -> list[tuple[int, int]]:
    starts = block_starts(length, size)
    return [_known_range(method, mask, start, size, sizes) for start in starts]


def _of_block(ends: tuple[int, ...], block: Any) -> Any:
    """The bound of one block; a Python int if all blocks have the same."""
    if len(set(ends)) == 1:
        return ends[0]
    return jax.lax.dynamic_index_in_dim(jnp.asarray(ends, jnp.int32), block, keepdims=False)


def _clipped(mask: Any, method: str, answer: Any, sizes: Sizes) -> Range:
    """Clips a range to the keys, since user classes may exceed them."""
    is_pair = isinstance(answer, tuple | list) and len(answer) == 2
    if not is_pair or not all(_is_index(x) for x in answer):
        _refuse(mask, method, "two whole numbers, the first key and the end of the last", answer)
    lo, hi = (clip(int(x) if is_integer(x) else x, sizes.S) for x in answer)
    return lo, hi


# Bands, runs, segments and reach.


def as_known_band(mask: Any) -> Band | None:
    """The bound mask as a `Band` with ends as Python ints, or None if it is not one."""
    band = _evaluate_static(mask, "as_band")
    if band is None:
        return None
    if not isinstance(band, Band):
        _refuse(mask, "as_band", "a flax_attn.Band or None", band)
    lo, hi = (None if x is None else _number(mask, "as_band", x) for x in band[:2])
    kv, rows = (None if x is None else _count(mask, x) for x in band[2:])
    return Band(lo, hi, kv, rows)


def runs_of(mask: Any, q: Any) -> tuple[Any, Any] | None:
    """First key and end of each query's contiguous range of keys, from `Mask.as_runs`."""
    runs = _evaluate_static(mask, "as_runs", q)
    fits = isinstance(runs, tuple) and len(runs) == 2
    if runs is not None and not (fits and all(x is None or _is_whole_array(x) for x in runs)):
        _refuse(mask, "as_runs", "the first keys and the ends, as arrays of integers", runs)
    return runs


def segments_of(mask: Any) -> tuple[Any, Any] | None:
    """Ids of queries and keys, which attend where equal, from `Mask.as_segments`, or None."""
    ids = mask.as_segments()
    fits = isinstance(ids, tuple) and len(ids) == 2
    if ids is not None and not (fits and all(_is_whole_array(x) for x in ids)):
        _refuse(mask, "as_segments", "the ids of queries and those of keys, as integers", ids)
    return ids


def reach_of(mask: Any, keep_first: int = 0) -> int | None:
    """Number of past tokens a mask attends to, itself included; None if unbounded."""
    back = _evaluate_static(mask, "reach", keep_first)
    return None if back is None else _number(mask, "reach", back)


def _evaluate_static(mask: Any, method: str, *args: Any) -> Any:
    if not mask.is_static:
        return _evaluate(mask, method, *args)
    with jax.ensure_compile_time_eval():
        return _evaluate(mask, method, *args)


def _evaluate(mask: Any, method: str, *args: Any) -> Any:
    try:
        return getattr(mask, method)(*args)
    except TRACED as error:
        raise TypeError(
            f"{type(mask).__name__}.{method} uses a value as static that is known only when the "
            "program runs. Write it in jax.numpy: jnp.maximum for np.maximum or max, jnp.where for "
            "if. A mask without arrays that uses neither b nor n may set is_static = True."
        ) from error


def _number(mask: Any, method: str, x: Any) -> int:
    if not _is_index(x) or isinstance(x, Tracer):
        _refuse(mask, method, "whole numbers that are static", x)
    return int(x)


def _count(mask: Any, x: Any) -> Any:
    if not _is_whole_array(x):
        _refuse(mask, "as_band", "kv and rows as integers", x)
    return int(x) if is_integer(x) else x


def _is_index(x: Any) -> bool:
    """Whether x is an integer scalar of Python, numpy or jax, traced or not."""
    return is_integer(x) or (getattr(x, "ndim", None) == 0 and _is_whole_array(x))


def _is_whole_array(x: Any) -> bool:
    return is_integer(x) or jnp.issubdtype(dtype_of(x), jnp.integer)


def _refuse(mask: Any, method: str, wanted: str, answer: Any) -> None:
    raise TypeError(f"{type(mask).__name__}.{method} must return {wanted}; it returned {answer!r}.")
