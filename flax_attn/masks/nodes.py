"""Masks: what may look at what. Data, combined with `&`, `|` and `~`; True means "may look".

A mask is a frozen pytree that hashes by value. It answers for index arrays (`mask(b, n, q, k)`),
for a whole attention (`mask.grid(sizes)`), and for a block of queries (`mask.key_range(...)`,
`mask.seen_range(...)`), so that a backend may skip what nobody sees. A node stands here with all
that it answers, so that a new one changes no other file.

With T != S the diagonal is stated: `offset=0` is upper-left, as torch and jax have it;
`offset="end"` lets the last query see the last key, as flash-attention does.

    >>> from flax_attn._types import Sizes
    >>> (Causal() & Window(1, 0)).static(Sizes((), 1, 3, 3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
"""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import (
    FAR,
    bound_offset,
    by_entry,
    check_boolean,
    check_integers,
    check_offset,
    clip,
    ids_per_entry,
    is_count,
    is_whole,
    near,
    numbers_in_lists,
    of_entry,
    per_entry,
    pick,
)
from .._types import Sizes, frozen
from ..places import Places, in_whole
from .algebra import Band, Mask, Rows

Offset = int | Literal["end"] | Any


@frozen
class Causal(Mask):
    """`k <= q + offset`: no looking ahead; `CAUSAL` is the one of offset 0.

    Args:
      offset: how far query 0 stands from key 0; `"end"` lets the last query see the last key. An
        array of integers that broadcasts to `*B` gives every batch entry its own, as caches
        filled to different lengths need it. Padding on the left moves queries and keys alike:
        there it stays 0, beside `~Lengths(padding)`.

    Raises:
      ValueError: if `offset` is neither of integers nor "end"; in use, if it does not broadcast.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> Causal()(0, 0, 1, np.arange(4)).tolist()  # which of four keys query 1 sees
    [True, True, False, False]
    """

    offset: Offset = 0

    AXES: ClassVar = {"offset": "b"}

    def __post_init__(self):
        numbers_in_lists(self, "offset")
        check_offset("Causal", self.offset)

    def bind(self, sizes):
        return Causal(bound_offset("Causal", self.offset, sizes))

    def __call__(self, b, n, q, k):
        return k <= q + of_entry(self.offset, b)

    def grid(self, sizes):
        _, _, q, k = sizes.iotas()
        return k <= q + by_entry(self.offset)

    def key_range(self, b, n, q, sizes):
        return 0, clip(q[1] + of_entry(self.offset, b), sizes.S)

    def seen_range(self, b, n, q, sizes):
        return 0, clip(q[0] + of_entry(self.offset, b) + 1, sizes.S)

    def as_band(self):
        return _shifted(None, 0, self.offset)


@frozen
class Window(Mask):
    """`q + offset - left <= k <= q + offset + right`: counts of keys beside self, None unlimited.

    Hugging Face's `sliding_window=W` counts self: it is `Window(W - 1, 0)`.

    Args:
      left, right: how many keys before and after its own a query sees.
      offset: as of `Causal`; two masks joined by `&` mean the same diagonal only by equal offsets.

    Raises:
      ValueError: for a count that is no integer of 0 or more, or an offset that is none.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer", 2020.

    >>> Window(1, 0)(0, 0, 2, np.arange(4)).tolist()
    [False, True, True, False]
    """

    left: int | None
    right: int | None
    offset: Offset = 0

    AXES: ClassVar = {"offset": "b"}

    def __post_init__(self):
        for name, count in (("left", self.left), ("right", self.right)):
            if count is not None and not is_count(count, 0):
                text = "must be a count of keys, 0 or more, or None"
                raise ValueError(f"Window.{name} {text}; got {count!r}.")
            object.__setattr__(self, name, None if count is None else int(count))
        numbers_in_lists(self, "offset")
        check_offset("Window", self.offset)

    def bind(self, sizes):
        offset = bound_offset("Window", self.offset, sizes)
        if not is_whole(self.offset):
            left, right = (None if n is None else min(n, 2 * FAR) for n in (self.left, self.right))
            return Window(left, right, offset)
        # Both ends are moved before they are cut off, since far offsets and counts may cancel.
        far = int(self.offset)
        left = None if self.left is None else offset - near(far - self.left)
        right = None if self.right is None else near(far + self.right) - offset
        return Window(left, right, offset)

    def __call__(self, b, n, q, k):
        return self._within(k - q - of_entry(self.offset, b))

    def grid(self, sizes):
        _, _, q, k = sizes.iotas()
        return jnp.asarray(self._within(k - q - by_entry(self.offset)))

    def _within(self, beside):
        seen = np.True_ if self.left is None else beside >= -self.left
        return seen if self.right is None else seen & (beside <= self.right)

    def key_range(self, b, n, q, sizes):
        offset = of_entry(self.offset, b)
        lo = 0 if self.left is None else clip(q[0] + offset - self.left, sizes.S)
        hi = sizes.S if self.right is None else clip(q[1] + offset + self.right, sizes.S)
        return lo, hi

    def seen_range(self, b, n, q, sizes):
        first, last = (at + of_entry(self.offset, b) for at in (q[0], q[1] - 1))
        lo = 0 if self.left is None else clip(last - self.left, sizes.S)
        return lo, sizes.S if self.right is None else clip(first + self.right + 1, sizes.S)

    def as_band(self):
        return _shifted(None if self.left is None else -self.left, self.right, self.offset)


def _shifted(lo: int | None, hi: int | None, offset: Any) -> Band | None:
    if not isinstance(offset, int | np.integer):  # a traced one
        return None
    return Band(*(None if end is None else end + int(offset) for end in (lo, hi)))


@frozen
class Chunked(Mask):
    """`q // size == k // size`: chunks of positions that see only themselves.

    Args:
      size: positions in a chunk.

    Raises:
      ValueError: if `size` is no integer of 1 or more.

    Source: Child et al., "Generating Long Sequences with Sparse Transformers", 2019.

    >>> Chunked(2)(0, 0, 2, np.arange(4)).tolist()
    [False, False, True, True]
    """

    size: int

    AXES: ClassVar = {}

    def __post_init__(self):
        if not is_count(self.size, 1):
            text = "must be a count of positions, 1 or more"
            raise ValueError(f"Chunked.size {text}; got {self.size!r}.")
        object.__setattr__(self, "size", near(self.size))

    def __call__(self, b, n, q, k):
        return q // self.size == k // self.size

    def key_range(self, b, n, q, sizes):
        lo, hi = q[0] // self.size * self.size, ((q[1] - 1) // self.size + 1) * self.size
        return clip(lo, sizes.S), clip(hi, sizes.S)

    def seen_range(self, b, n, q, sizes):
        one, two = q[0] // self.size, (q[1] - 1) // self.size
        lo, hi = two * self.size, (one + 1) * self.size  # empty unless they are one chunk
        return clip(lo, sizes.S), clip(hi, sizes.S)

    def reach(self, keep_first=0):
        return self.size

    def as_runs(self, q):
        first = q // self.size * self.size
        return first, first + self.size


@frozen
class Prefix(Mask):
    """`k < length`: keys that everybody sees; `Causal() | Prefix(p)` is a prefix language model.

    Args:
      length: an integer, or an array of integers that broadcasts to `*B`.

    Raises:
      TypeError: if `length` is no integer.
      ValueError: in use, if it does not broadcast to `*B`.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.2.1.

    >>> (Causal() | Prefix(2))(0, 0, 0, np.arange(4)).tolist()
    [True, True, False, False]
    """

    length: Any

    AXES: ClassVar = {"length": "b"}

    def __post_init__(self):
        numbers_in_lists(self, "length")
        check_integers("Prefix", length=self.length)

    def bind(self, sizes):
        if self.is_static:
            return Prefix(near(self.length))
        return Prefix(per_entry("Prefix.length", near(self.length), sizes))

    def __call__(self, b, n, q, k):
        return k < of_entry(self.length, b)

    def grid(self, sizes):
        return sizes.iotas()[3] < by_entry(self.length)

    def key_range(self, b, n, q, sizes):
        return 0, clip(of_entry(self.length, b), sizes.S)

    seen_range = key_range

    def reach(self, keep_first=0):
        return 0 if self.is_static and self.length <= keep_first else None

    def as_band(self):
        return Band(kv=self.length)


@frozen
class Lengths(Mask):
    """`k < kv[b]` and, if `q` is given, `q < q[b]`: padding on the right; `~`, on the left.

    Args:
      kv, q: how many keys and queries are no padding; integers that broadcast to `*B`.

    Raises:
      TypeError: if they are no integers.
      ValueError: in use, if they do not broadcast to `*B`.

    Source: `key_padding_mask` of torch.nn.MultiheadAttention, which is True where hidden.

    >>> Lengths(jnp.asarray([4, 1]))(1, 0, 0, np.arange(4)).tolist()
    [True, False, False, False]
    """

    kv: Any
    q: Any = field(default=None, kw_only=True)

    AXES: ClassVar = {"kv": "b", "q": "b"}

    def __post_init__(self):
        numbers_in_lists(self, "kv", "q")
        check_integers("Lengths", kv=self.kv, q=self.q)

    @property
    def is_static(self):
        return False

    def bind(self, sizes):
        kv = per_entry("Lengths.kv", near(self.kv), sizes)
        return Lengths(
            kv, q=None if self.q is None else per_entry("Lengths.q", near(self.q), sizes)
        )

    def __call__(self, b, n, q, k):
        seen = k < of_entry(self.kv, b)
        return seen if self.q is None else seen & (q < of_entry(self.q, b))

    def grid(self, sizes):
        _, _, q, k = sizes.iotas()
        seen = k < by_entry(self.kv)
        return seen if self.q is None else seen & (q < by_entry(self.q))

    def key_range(self, b, n, q, sizes):
        hi = clip(of_entry(self.kv, b), sizes.S)
        return 0, hi if self.q is None else jnp.where(q[0] < of_entry(self.q, b), hi, 0)

    def seen_range(self, b, n, q, sizes):
        hi = clip(of_entry(self.kv, b), sizes.S)
        return 0, hi if self.q is None else jnp.where(q[1] <= of_entry(self.q, b), hi, 0)

    def as_band(self):
        return Band(kv=self.kv, rows=self.q)


@frozen
class Segments(Mask):
    """`ids[q] == ids[k]`, or `q_ids[q] == kv_ids[k]`: packed documents see only themselves.

    Args:
      ids: the document of each token, integers, `*B T`, where T equals S. Padding with an id of its
        own sees itself: add `Lengths` to hide it.
      q_ids, kv_ids: in place of `ids`, those of the queries, `*B T`, and of the keys, `*B S`.

    Raises:
      TypeError: if they are no integers; unless either `ids` or both others are given.
      ValueError: in use, if their shapes do not fit.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.

    >>> ids = jnp.asarray([[7, 7, 8, 8]])
    >>> Segments(ids)(0, 0, 2, np.arange(4)).tolist()
    [False, False, True, True]
    """

    ids: Any = None
    q_ids: Any = field(default=None, kw_only=True)
    kv_ids: Any = field(default=None, kw_only=True)

    AXES: ClassVar = {"ids": "bq", "q_ids": "bq", "kv_ids": "bk"}

    def __post_init__(self):
        names = [name for name in ("ids", "q_ids", "kv_ids") if getattr(self, name) is not None]
        if names not in (["ids"], ["q_ids", "kv_ids"]):
            given = " and ".join(names) or "no ids"
            raise TypeError(
                "Segments takes one array for queries and keys, Segments(ids), or one for each, "
                f"Segments(q_ids=..., kv_ids=...); got {given}."
            )
        numbers_in_lists(self, *names)
        check_integers("Segments", **{name: getattr(self, name) for name in names})

    def bind(self, sizes):
        if self.ids is not None and sizes.T != sizes.S:
            raise ValueError(
                f"Segments(ids) is for queries and keys of one length; got T={sizes.T} and "
                f"S={sizes.S}: say Segments(q_ids=..., kv_ids=...)."
            )
        both = {"q_ids": self.q_ids, "kv_ids": self.kv_ids}
        ids = ids_per_entry("Segments", sizes, **(both if self.ids is None else {"ids": self.ids}))
        return Segments(q_ids=ids[0], kv_ids=ids[-1])

    def __call__(self, b, n, q, k):
        q_ids, kv_ids = self.as_segments()
        return jnp.asarray(q_ids)[b, q] == jnp.asarray(kv_ids)[b, k]

    def grid(self, sizes):
        return self.q_ids[:, None, :, None] == self.kv_ids[:, None, None, :]

    def as_segments(self):
        return (self.q_ids, self.kv_ids) if self.ids is None else (self.ids, self.ids)

    def key_range(self, b, n, q, sizes):
        """From the first to the last key whose segment lies among those of the queries."""
        if not isinstance(q, Rows):  # how many they are is not known
            return 0, sizes.S
        lo, hi, _ = self._keys_of(b, q, sizes)
        return lo, hi

    def seen_range(self, b, n, q, sizes):
        """The keys of the segment, if the queries are of one and its keys stand together."""
        if not isinstance(q, Rows):
            return 0, 0
        lo, hi, whole = self._keys_of(b, q, sizes)
        return pick(whole, lo, 0), pick(whole, hi, 0)

    def _keys_of(self, b: Any, q: Rows, sizes: Sizes) -> tuple[Any, Any, Any]:
        """The run that holds all keys of the queries' segments, and whether it is of one."""
        mine = jax.lax.dynamic_slice_in_dim(self.q_ids[b], q[0], q.size)
        keys, least, most = self.kv_ids[b], mine.min(), mine.max()
        found = (keys >= least) & (keys <= most)
        some = found.any()
        first = partial(jax.lax.argmax, axis=0, index_dtype=jnp.int32)  # with x64 on, too
        lo = jnp.where(some, first(found), sizes.S).astype(jnp.int32)
        hi = jnp.where(some, sizes.S - first(found[::-1]), 0).astype(jnp.int32)
        return lo, hi, (least == most) & (found.sum(dtype=jnp.int32) == hi - lo)


@frozen
class MaskFn(Mask):
    """`fn(b, n, q, k)` on index arrays, which torch's flex attention calls `mask_mod`.

    Batch entries are numbered through when there are several batch axes. Functions are told apart
    by identity: define one once, outside the call, or every call traces anew.

    Args:
      fn: from four integer arrays that broadcast against each other to booleans.
      places: where batch entries and heads stand in the whole; `attend` sets it for shards.

    Raises:
      TypeError: in use, if what it returns is not boolean.

    Source: Dong et al., "Flex Attention", 2024.

    >>> MaskFn(lambda b, n, q, k: (q + k) % 2 == 0)(0, 0, 1, np.arange(4)).tolist()
    [False, True, False, True]
    """

    fn: Callable[[Any, Any, Any, Any], Any]
    places: Places | None = None

    AXES: ClassVar = {}

    @property
    def is_static(self):
        return False

    def at(self, places):
        return MaskFn(self.fn, places)

    def __call__(self, b, n, q, k):
        with jax.numpy_dtype_promotion("standard"):  # indices may be mixed with anything
            seen = self.fn(*in_whole(self.places, b, n), q, k)
        check_boolean(np.asarray(seen) if isinstance(seen, bool) else seen)
        return seen


CAUSAL = Causal()
