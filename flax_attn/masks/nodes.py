"""Masks without contiguous key ranges: packed documents by ids, and functions."""

from collections.abc import Callable
from dataclasses import field
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.arrays import check_boolean, check_integers, ids_per_entry, lists_to_arrays, select
from .._internal.checks import check_takes, traced_indices
from .._internal.types import Sizes, frozen
from ..places import Places, check_reads, in_whole
from .algebra import Mask
from .ranges import Rows


@frozen
class Segments(Mask):
    """`ids[q] == ids[k]`, or `q_ids[q] == kv_ids[k]`: packed documents attend only to themselves.

    Also called: document mask, segment ids, sequence packing, packed documents.

    Args:
      ids: the document of each token, integers, `*B T`, where T equals S. Padding with a
        separate id attends to itself: add `Lengths` to mask it.
      q_ids, kv_ids: instead of `ids`, the ids of the queries, `*B T`, and of the keys, `*B S`.

    Raises:
      TypeError: if they are not integers; unless either `ids` or both others are given.
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
            listed = " and ".join(names) or "no ids"
            raise TypeError(
                "Segments takes one array for queries and keys, Segments(ids), or one for each, "
                f"Segments(q_ids=..., kv_ids=...); got {listed}."
            )
        lists_to_arrays(self, *names)
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
        """From the first to the last key with an id in the range of the queries' ids."""
        if not isinstance(q, Rows):  # their number is not static
            return 0, sizes.S
        lo, hi, _ = self._keys_of(b, q, sizes)
        return lo, hi

    def seen_range(self, b, n, q, sizes):
        """The keys of the segment, if the queries share one and its keys are contiguous."""
        if not isinstance(q, Rows):
            return 0, 0
        lo, hi, whole = self._keys_of(b, q, sizes)
        return select(whole, lo, 0), select(whole, hi, 0)

    def _keys_of(self, b: Any, q: Rows, sizes: Sizes) -> tuple[Any, Any, Any]:
        """The range that holds all keys of the queries' segments, and whether it is one segment."""
        mine = jax.lax.dynamic_slice_in_dim(self.q_ids[b], q[0], q.size)
        keys, least, most = self.kv_ids[b], mine.min(), mine.max()
        among = (keys >= least) & (keys <= most)
        some = among.any()
        first = partial(jax.lax.argmax, axis=0, index_dtype=jnp.int32)  # int32 also with x64
        lo = jnp.where(some, first(among), sizes.S).astype(jnp.int32)
        hi = jnp.where(some, sizes.S - first(among[::-1]), 0).astype(jnp.int32)
        return lo, hi, (least == most) & (among.sum(dtype=jnp.int32) == hi - lo)


@frozen
class MaskFn(Mask):
    """`fn(b, n, q, k)` on index arrays, the `mask_mod` of torch's flex attention.

    Also called: `mask_mod` of FlexAttention.

    With several batch axes, b numbers their entries in row-major order. Functions are compared by
    identity: define `fn` once, outside the call, or every call traces again.

    Args:
      fn: from four integer arrays that broadcast against each other to booleans.
      reads: which indices a layer passes if there is padding, as in `Mask`.
      places: global indices of batch entries and heads; `attend` sets it for shards.

    Raises:
      TypeError: if `fn` takes other arguments; in use, if what it returns is not boolean.
      ValueError: for an unknown `reads`.

    Source: Dong et al., "Flex Attention", 2024.

    >>> MaskFn(lambda b, n, q, k: (q + k) % 2 == 0)(0, 0, 1, np.arange(4)).tolist()
    [False, True, False, True]
    """

    fn: Callable[[Any, Any, Any, Any], Any]
    places: Places | None = None
    reads: str = field(default="order", kw_only=True)

    AXES: ClassVar = {}

    def __post_init__(self):
        check_reads(self)
        check_takes("MaskFn", self.fn, "b, n, q, k")

    @cached_property
    def is_static(self):
        return False

    def at(self, places):
        return MaskFn(self.fn, places, reads=self.reads)

    def __call__(self, b, n, q, k):
        # `fn` may mix indices with any dtype.
        with traced_indices("MaskFn"), jax.numpy_dtype_promotion("standard"):
            visible = self.fn(*in_whole(self.places, b, n), q, k)
        check_boolean(np.asarray(visible) if isinstance(visible, bool) else visible)
        return visible
