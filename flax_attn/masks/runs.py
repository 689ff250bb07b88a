"""Masks with one contiguous range of keys per query.

Such a mask defines the start and end of each query's range as data. All methods of `Mask` follow
from these bounds: the mask's values, key ranges of blocks of queries, the bands and ranges that
kernels take, and how far back a cache must reach.

If T != S, `offset` sets the diagonal: `offset=0` is upper-left, as in torch and jax, and
`offset="end"` aligns the last query with the last key, as in flash-attention.

    >>> from flax_attn._internal.types import Sizes
    >>> (Causal() & Window(1, 0)).static(Sizes((), 1, 3, 3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import field
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._internal.arrays import (
    INT32_MAX,
    bound_offset,
    check_integers,
    check_offset,
    clip,
    is_count,
    is_integer,
    lists_to_arrays,
    per_entry,
    saturate,
    saturating_add,
    select,
    take_entry,
)
from .._internal.types import Sizes, frozen
from .algebra import Mask
from .ranges import Band

Offset = int | Literal["end"] | Any


MIN_OFFSET = -INT32_MAX - 1  # the smallest offset: it masks all keys of every query


class Edge(NamedTuple):
    """A bound of query q's range of keys: `q // chunk * chunk + at + by`.

    It is the last visible key, or the key before the first, saturated at the limits of int32. It
    never decreases in q, so a block's bounds are those of its first and last query.

    Attributes:
      at: an int, or one per batch entry; in an unbound mask also "end".
      by: an int.
      chunk: positions per chunk, 1 for q itself; None for a bound `at + by` without q.
    """

    at: Any = 0
    by: int = 0
    chunk: int | None = 1

    def of(self, q: Any, at: Any) -> Any:
        """The bound for queries q, with `at` in a shape that broadcasts to them."""
        moved = saturating_add(at, self.by, MIN_OFFSET)
        if self.chunk is None:
            return moved
        return saturating_add(q if self.chunk == 1 else q // self.chunk * self.chunk, moved)


class Run(NamedTuple):
    """Query q attends to keys `before < k <= last`, if `q < rows`; None for no bound."""

    before: Edge | None = None
    last: Edge | None = None
    rows: Any = None


class RunMask(Mask):
    """Base of masks with one range of keys per query. Subclasses define `run`."""

    def run(self) -> Run:
        """The bounds of every query's range; for a bound mask."""
        raise NotImplementedError

    def __call__(self, b, n, q, k):
        return self._visible(q, k, lambda at: take_entry(at, b))

    def grid(self, sizes):
        _, _, q, k = sizes.iotas()
        return jnp.asarray(self._visible(q, k, partial(_entries, axes=3)))

    def _visible(self, q: Any, k: Any, of: Callable[[Any], Any]) -> Any:
        before, last, rows = self.run()
        conditions = [k > before.of(q, of(before.at))] if before is not None else []
        conditions += [k <= last.of(q, of(last.at))] if last is not None else []
        conditions += [q < of(rows)] if rows is not None else []
        return reduce(and_, conditions) if conditions else np.True_

    def key_range(self, b, n, q, sizes):
        return self._between(b, q[0], q[1] - 1, q[0], sizes)

    def seen_range(self, b, n, q, sizes):
        return self._between(b, q[1] - 1, q[0], q[1] - 1, sizes)

    def _between(self, b: Any, first_of: Any, last_of: Any, in_rows: Any, sizes: Any) -> Any:
        """Keys from the start of `first_of`'s range to the end of `last_of`'s.

        Empty if the query `in_rows` is not among the first `rows`.
        """
        before, last, rows = self.run()
        lo, hi = 0, sizes.S
        if before is not None:
            lo = clip(saturating_add(before.of(first_of, take_entry(before.at, b)), 1), sizes.S)
        if last is not None:
            hi = clip(saturating_add(last.of(last_of, take_entry(last.at, b)), 1), sizes.S)
        return lo, hi if rows is None else select(in_rows < take_entry(rows, b), hi, 0)

    def as_band(self):
        before, last, rows = self.run()
        kv = None
        if last is not None and last.chunk is None:
            kv, last = saturating_add(last.of(None, last.at), 1), None
        if not all(x is None or (x.chunk == 1 and is_integer(x.at)) for x in (before, last)):
            return None
        lo = None if before is None else saturate(int(before.at) + before.by + 1)
        return Band(lo, None if last is None else saturate(int(last.at) + last.by), kv, rows)

    def as_runs(self, q):
        edges = self.run()[:2]
        first, end = (
            None if x is None else saturating_add(x.of(q, _entries(x.at, axes=1)), 1) for x in edges
        )
        return super().as_runs(q) or (first, end)

    def reach(self, keep_first=0):
        before, last, _ = self.run()
        back = super().reach(keep_first)
        if back is None and before is not None and before.chunk and is_integer(before.at):
            return before.chunk - int(before.at) - before.by - 1
        if back is None and last is not None and last.chunk is None and is_integer(last.at):
            return 0 if last.of(None, last.at) < keep_first else None
        return back


def _entries(x: Any, axes: int) -> Any:
    """A scalar as it is; values per batch entry with `axes` trailing axes of size 1."""
    return x.reshape(-1, *[1] * axes) if jnp.ndim(x) else x


@frozen
class Full(RunMask):
    """Every query may attend to every key; `FULL` is an instance. Raises nothing.

    Also called: no mask, bidirectional attention.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> bool(Full()(0, 0, 1, 4))
    True
    """

    AXES: ClassVar = {}
    reads = "nothing"

    def run(self):
        return Run()


@frozen
class Causal(RunMask):
    """`k <= q + offset`: no later keys; `CAUSAL` is the instance with offset 0.

    Also called: causal mask, look-ahead mask, lower-triangular mask.

    Args:
      offset: the distance of query 0 from key 0; `"end"` aligns the last query with the last key.
        An array of integers that broadcasts to `*B` sets it per batch entry, for caches filled to
        different lengths. Left padding shifts both queries and keys, so the offset stays 0: use
        `CAUSAL & ~Lengths(padding)`.

    Raises:
      ValueError: if `offset` is neither of integers nor "end"; in use, if it does not broadcast.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> Causal()(0, 0, 1, np.arange(4)).tolist()  # which of four keys query 1 sees
    [True, True, False, False]
    """

    offset: Offset = 0

    AXES: ClassVar = {"offset": "b"}

    def __post_init__(self):
        lists_to_arrays(self, "offset")
        check_offset("Causal", self.offset)

    @property
    def reads(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns "sequence", or "distance" with an offset other than 0 or "end"."""
        is_plain = isinstance(self.offset, str) or (is_integer(self.offset) and self.offset == 0)
        return "sequence" if is_plain else "distance"

    def bind(self, sizes):
        if type(self.offset) is int and -INT32_MAX <= self.offset <= INT32_MAX:
            return self
        return Causal(bound_offset("Causal", self.offset, sizes, MIN_OFFSET))

    def run(self):
        return Run(last=Edge(self.offset))


@frozen
class Window(RunMask):
    """`q + offset - left <= k <= q + offset + right`: counts exclude self; None is unlimited.

    Also called: sliding-window attention (SWA), local attention.

    Hugging Face's `sliding_window=W` counts self: it is `Window(W - 1, 0)`.

    Args:
      left, right: number of visible keys before and after the query's own.
      offset: as in `Causal`; masks joined by `&` share a diagonal only if their offsets are equal.

    Raises:
      ValueError: for a count that is not an integer >= 0, or an invalid offset.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer", 2020.

    >>> Window(1, 0)(0, 0, 2, np.arange(4)).tolist()
    [False, True, True, False]
    """

    left: int | None
    right: int | None
    offset: Offset = 0

    AXES: ClassVar = {"offset": "b"}
    reads = "distance"

    def __post_init__(self):
        for name, count in (("left", self.left), ("right", self.right)):
            if count is not None and not is_count(count, 0):
                text = "must be a count of keys, 0 or more, or None"
                raise ValueError(f"Window.{name} {text}; got {count!r}.")
            object.__setattr__(self, name, None if count is None else int(count))
        lists_to_arrays(self, "offset")
        check_offset("Window", self.offset)

    def bind(self, sizes):
        offset = bound_offset("Window", self.offset, sizes, MIN_OFFSET)
        if not is_integer(self.offset):
            left, right = (
                None if n is None else min(n, -2 * MIN_OFFSET) for n in (self.left, self.right)
            )
            return Window(left, right, offset)
        # Add before saturating, since large offsets and counts may cancel.
        known_offset = int(self.offset)
        left = (
            None if self.left is None else offset - saturate(known_offset - self.left, MIN_OFFSET)
        )
        right = (
            None if self.right is None else saturate(known_offset + self.right, MIN_OFFSET) - offset
        )
        return Window(left, right, offset)

    def run(self):
        return Run(
            None if self.left is None else Edge(self.offset, -self.left - 1),
            None if self.right is None else Edge(self.offset, self.right),
        )


@frozen
class Chunked(RunMask):
    """`q // size == k // size`: chunks of positions that attend only to themselves.

    Also called: chunked attention, block-diagonal mask.

    Args:
      size: positions in a chunk.

    Raises:
      ValueError: if `size` is not an integer >= 1.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.

    >>> Chunked(2)(0, 0, 2, np.arange(4)).tolist()
    [False, False, True, True]
    """

    size: int

    AXES: ClassVar = {}
    reads = "position"

    def __post_init__(self):
        if not is_count(self.size, 1):
            text = "must be a count of positions, 1 or more"
            raise ValueError(f"Chunked.size {text}; got {self.size!r}.")
        object.__setattr__(self, "size", saturate(self.size))

    def run(self):
        return Run(Edge(by=-1, chunk=self.size), Edge(by=self.size - 1, chunk=self.size))


@frozen
class Prefix(RunMask):
    """`k < length`: keys visible to all queries; `Causal() | Prefix(p)` is a prefix LM.

    Also called: prefix-LM mask.

    Args:
      length: an integer, or an array of integers that broadcasts to `*B`.

    Raises:
      TypeError: if `length` is not an integer.
      ValueError: in use, if it does not broadcast to `*B`.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.2.1.

    >>> (Causal() | Prefix(2))(0, 0, 0, np.arange(4)).tolist()
    [True, True, False, False]
    """

    length: Any

    AXES: ClassVar = {"length": "b"}
    reads = "position"

    def __post_init__(self):
        lists_to_arrays(self, "length")
        check_integers("Prefix", length=self.length)

    def bind(self, sizes):
        if self.is_static:
            return Prefix(saturate(self.length))
        return Prefix(per_entry("Prefix.length", saturate(self.length), sizes))

    def run(self):
        return Run(last=Edge(self.length, -1, chunk=None))


@frozen
class Lengths(RunMask):
    """`k < kv[b]` and, if `q` is given, `q < q[b]`: right padding; with `~`, left padding.

    Also called: padding mask, key padding mask.

    Args:
      kv, q: the number of keys and queries without padding; integers that broadcast to `*B`.

    Raises:
      TypeError: if they are not integers.
      ValueError: in use, if they do not broadcast to `*B`.

    Source: `key_padding_mask` of torch.nn.MultiheadAttention, which is True where masked.

    >>> Lengths(jnp.asarray([4, 1]))(1, 0, 0, np.arange(4)).tolist()
    [True, False, False, False]
    """

    kv: Any
    q: Any = field(default=None, kw_only=True)

    AXES: ClassVar = {"kv": "b", "q": "b"}
    reads = "slot"

    def __post_init__(self):
        lists_to_arrays(self, "kv", "q")
        check_integers("Lengths", kv=self.kv, q=self.q)

    @cached_property
    def is_static(self):
        return False

    def bind(self, sizes):
        q = None if self.q is None else per_entry("Lengths.q", saturate(self.q), sizes)
        return Lengths(self._count(sizes), q=q)

    def _count(self, sizes: Sizes) -> jax.Array:
        """The number of real keys of each batch entry, B."""
        if jnp.ndim(self.kv) > len(sizes.batch):
            raise ValueError(
                f"Lengths needs a number of tokens for each row, shape {sizes.batch}; got shape "
                f"{jnp.shape(self.kv)}. Of ones and zeros the numbers are array.sum(-1)."
            )
        return per_entry("Lengths.kv", saturate(self.kv), sizes)

    def run(self):
        return Run(last=Edge(self.kv, -1, chunk=None), rows=self.q)

    def real_tokens(self, shape):
        if self.q is not None:
            return super().real_tokens(shape)
        # Known lengths stay known while a program is traced.
        with nullcontext() if isinstance(self.kv, Tracer) else jax.ensure_compile_time_eval():
            count = self._count(Sizes(shape[:-1], 1, 1, 1))
            return (jnp.arange(shape[-1], dtype=jnp.int32)[None] < count[:, None]).reshape(shape)


FULL = Full()
CAUSAL = Causal()
