"""Masks: what may look at what. Data, combined with `&`, `|` and `~`; True means "may look".

A mask is a frozen pytree that hashes by value. It answers for index arrays (`mask(b, n, q, k)`),
for a whole attention (`mask.grid(sizes)`), and for a block of queries (`mask.key_range(...)`), so
that a backend may skip what nobody sees. With T != S the diagonal is stated: `offset=0` is
upper-left, as torch and jax have it; `offset="end"` lets the last query see the last key, as
flash-attention does.

    >>> (Causal() & Window(1, 0)).static(Sizes((), 1, 3, 3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ._arrays import (
    check_boolean,
    check_integers,
    check_offset,
    clip,
    is_count,
    larger,
    look_up,
    per_entry,
    smaller,
    to_grid,
)
from ._types import Sizes, frozen

Range = tuple[Any, Any]
Offset = int | Literal["end"]


class Mask:
    """The base of all masks. A subclass says which (b, n, q, k) may look; the rest has defaults."""

    __array_ufunc__ = None  # numpy then leaves `array & mask` to the mask

    @property
    def is_static(self) -> bool:
        """Whether the mask is known without any array, batch entry or head."""
        parts = (part for part in vars(self).values() if isinstance(part, Mask))
        return not jax.tree.leaves(self) and all(part.is_static for part in parts)

    def __call__(self, b: Any, n: Any, q: Any, k: Any) -> Any:
        """Whether query q of head n in batch entry b may look at key k; index arrays broadcast."""
        raise NotImplementedError

    def bind(self, sizes: Sizes) -> "Mask":
        """This mask for these sizes: shapes checked, batch axes as one, `"end"` as a number."""
        return self

    def grid(self, sizes: Sizes) -> jax.Array:
        """The mask of a whole attention; broadcasts to B N T S. The mask must be bound."""
        return jnp.asarray(self(*sizes.grid()))

    def key_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: no query of `range(*q)` may look at a key outside it. Conservative."""
        return 0, sizes.S

    def row_ranges(self, sizes: Sizes) -> tuple[np.ndarray, np.ndarray] | None:
        """`lo, hi` of each query, if the mask is static and each row one run of keys, else None."""
        seen = self.static(sizes)
        if seen is None:
            return None
        count = seen.sum(-1)
        lo = np.where(count > 0, seen.argmax(-1) if sizes.S else 0, 0)
        k = np.arange(sizes.S)
        runs = (seen == ((k >= lo[:, None]) & (k < (lo + count)[:, None]))).all()
        return (lo, lo + count) if runs else None

    def static(self, sizes: Sizes) -> np.ndarray | None:
        """The mask as a T S numpy array, if it is static."""
        if not self.is_static:
            return None
        _, _, q, k = sizes.grid()
        seen = self.bind(sizes)(0, 0, q.reshape(-1, 1), k.reshape(1, -1))
        return np.broadcast_to(np.asarray(seen), (sizes.T, sizes.S))

    def __and__(self, other: "Mask | jax.Array") -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: "Mask | jax.Array") -> "Mask":
        return Or(self, as_mask(other))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "Mask":
        return Not(self)


@frozen
class Full(Mask):
    """Every query may look at every key."""

    def __call__(self, b, n, q, k):
        return np.True_


@frozen
class Causal(Mask):
    """`k <= q + offset`: no looking ahead."""

    offset: Offset = 0

    def __post_init__(self):
        check_offset("Causal", self.offset)

    def bind(self, sizes):
        return Causal(_steps(self.offset, sizes))

    def __call__(self, b, n, q, k):
        return k <= q + self.offset

    def key_range(self, b, n, q, sizes):
        return 0, clip(q[1] + self.offset, sizes.S)


@frozen
class Window(Mask):
    """`q + offset - left <= k <= q + offset + right`: counts of keys beside self, None unlimited.

    Hugging Face's `sliding_window=W` counts self: it is `Window(W - 1, 0)`.
    """

    left: int | None
    right: int | None
    offset: Offset = 0

    def __post_init__(self):
        for name, count in (("left", self.left), ("right", self.right)):
            if count is not None and not is_count(count, 0):
                text = "must be a count of keys, 0 or more, or None"
                raise ValueError(f"Window.{name} {text}; got {count!r}.")
        check_offset("Window", self.offset)

    def bind(self, sizes):
        return Window(self.left, self.right, _steps(self.offset, sizes))

    def __call__(self, b, n, q, k):
        beside = k - q - self.offset
        seen = np.True_ if self.left is None else beside >= -self.left
        return seen if self.right is None else seen & (beside <= self.right)

    def key_range(self, b, n, q, sizes):
        lo = 0 if self.left is None else clip(q[0] + self.offset - self.left, sizes.S)
        hi = sizes.S if self.right is None else clip(q[1] + self.offset + self.right, sizes.S)
        return lo, hi


@frozen
class Chunked(Mask):
    """`q // size == k // size`: chunks of positions that see only themselves."""

    size: int

    def __post_init__(self):
        if not is_count(self.size, 1):
            text = "must be a count of positions, 1 or more"
            raise ValueError(f"Chunked.size {text}; got {self.size!r}.")

    def __call__(self, b, n, q, k):
        return q // self.size == k // self.size

    def key_range(self, b, n, q, sizes):
        lo, hi = q[0] // self.size * self.size, ((q[1] - 1) // self.size + 1) * self.size
        return clip(lo, sizes.S), clip(hi, sizes.S)


@frozen
class Prefix(Mask):
    """`k < length`: keys that everybody sees; `Causal() | Prefix(p)` is a prefix language model.

    `length` is an integer or an array of integers that broadcasts to `*B`.
    """

    length: Any

    def __post_init__(self):
        check_integers("Prefix", length=self.length)

    def bind(self, sizes):
        return self if self.is_static else Prefix(per_entry("Prefix.length", self.length, sizes))

    def __call__(self, b, n, q, k):
        return k < (self.length if self.is_static else self.length[b])

    def key_range(self, b, n, q, sizes):
        return 0, clip(self.length if self.is_static else self.length[b], sizes.S)


@frozen
class Lengths(Mask):
    """`k < kv[b]` and, if `q` is given, `q < q[b]`: padding on the right. Integers, `*B`."""

    kv: Any
    q: Any = None

    def __post_init__(self):
        check_integers("Lengths", kv=self.kv, q=self.q)

    @property
    def is_static(self):
        return False

    def bind(self, sizes):
        kv = per_entry("Lengths.kv", self.kv, sizes)
        return Lengths(kv, None if self.q is None else per_entry("Lengths.q", self.q, sizes))

    def __call__(self, b, n, q, k):
        seen = k < jnp.asarray(self.kv)[b]
        return seen if self.q is None else seen & (q < jnp.asarray(self.q)[b])

    def key_range(self, b, n, q, sizes):
        return 0, clip(self.kv[b], sizes.S)


@frozen
class Segments(Mask):
    """`q_ids[q] == kv_ids[k]`: packed documents see only themselves. Integers, `*B T`, `*B S`."""

    q_ids: Any
    kv_ids: Any = None

    def __post_init__(self):
        check_integers("Segments", q_ids=self.q_ids, kv_ids=self.kv_ids)

    def bind(self, sizes):
        kv_ids = self.q_ids if self.kv_ids is None else self.kv_ids
        q_ids = per_entry("Segments.q_ids", self.q_ids, sizes, sizes.T)
        return Segments(q_ids, per_entry("Segments.kv_ids", kv_ids, sizes, sizes.S))

    def __call__(self, b, n, q, k):
        return jnp.asarray(self.q_ids)[b, q] == jnp.asarray(self.kv_ids)[b, k]


@frozen
class Dense(Mask):
    """A boolean array that broadcasts to `*B N T S`; True may look."""

    array: Any

    def __post_init__(self):
        check_boolean(self.array)

    def bind(self, sizes):
        return Dense(to_grid("A mask", self.array, sizes))

    def __call__(self, b, n, q, k):
        return look_up(self.array, b, n, q, k)

    def grid(self, sizes):
        return jnp.asarray(self.array)


@frozen
class Fn(Mask):
    """`mask_mod(b, n, q, k)` on index arrays, as torch's flex attention writes it.

    Batch entries are numbered through when there are several batch axes. Functions are told apart
    by identity: define one once, outside the call, or every call traces anew.
    """

    mask_mod: Callable[[Any, Any, Any, Any], Any]

    @property
    def is_static(self):
        return False

    def __call__(self, b, n, q, k):
        seen = self.mask_mod(b, n, q, k)
        check_boolean(np.asarray(seen) if isinstance(seen, bool) else seen)
        return seen


@frozen
class And(Mask):
    """Both let it look."""

    a: Mask
    b: Mask

    def bind(self, sizes):
        return And(self.a.bind(sizes), self.b.bind(sizes))

    def __call__(self, b, n, q, k):
        return self.a(b, n, q, k) & self.b(b, n, q, k)

    def grid(self, sizes):
        return self.a.grid(sizes) & self.b.grid(sizes)

    def key_range(self, b, n, q, sizes):
        one, two = self.a.key_range(b, n, q, sizes), self.b.key_range(b, n, q, sizes)
        return larger(one[0], two[0]), smaller(one[1], two[1])


@frozen
class Or(Mask):
    """Either lets it look."""

    a: Mask
    b: Mask

    def bind(self, sizes):
        return Or(self.a.bind(sizes), self.b.bind(sizes))

    def __call__(self, b, n, q, k):
        return self.a(b, n, q, k) | self.b(b, n, q, k)

    def grid(self, sizes):
        return self.a.grid(sizes) | self.b.grid(sizes)

    def key_range(self, b, n, q, sizes):
        one, two = self.a.key_range(b, n, q, sizes), self.b.key_range(b, n, q, sizes)
        return smaller(one[0], two[0]), larger(one[1], two[1])


@frozen
class Not(Mask):
    """What the other hides."""

    a: Mask

    def bind(self, sizes):
        return Not(self.a.bind(sizes))

    def __call__(self, b, n, q, k):
        return ~self.a(b, n, q, k)

    def grid(self, sizes):
        return ~self.a.grid(sizes)


def as_mask(mask: Any) -> Mask:
    """A mask from a mask or a boolean array; a TypeError names both conventions otherwise."""
    return mask if isinstance(mask, Mask) else Dense(mask)


def _steps(offset: Offset, sizes: Sizes) -> int:
    return sizes.S - sizes.T if offset == "end" else offset


FULL, CAUSAL = Full(), Causal()
