"""The base class of masks, the operators `&`, `|` and `~`, and boolean arrays."""

from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.arrays import (
    check_boolean,
    look_up,
    maximum,
    minimum,
    saturating_add,
    select,
    to_grid,
)
from .._internal.drawing import DrawnMask
from .._internal.types import FROZEN, Sizes, frozen
from ..places import Places, in_whole
from .ranges import (
    Band,
    Range,
    as_known_band,
    combine,
    fully_visible_range,
    reach_of,
    runs_of,
    segments_of,
    visible_range,
)


class Mask(DrawnMask):
    """Base class of masks. A subclass defines `__call__`; all other methods have defaults.

    `draw` shows a mask as text, and a notebook as a picture.

    Decorate your own subclass with `flax_attn.frozen`, which makes it a dataclass, a pytree of its
    arrays, and equal by value. Every backend in plain JAX then takes it. Set `is_static = True` if
    it uses neither b nor n and holds no array. If you define `key_range` and `seen_range`, fully
    masked blocks are skipped, and fully visible blocks are not masked. The kernels of other
    libraries take masks that define `as_band`, `as_runs` or `as_segments`. `&`, `|` and `~` combine
    masks, also with boolean arrays.

    With padding or packed documents a layer evaluates a mask at indices other than slots (indices
    along the axis), as `reads` says: "order", the default, is a token's index among the real tokens
    of its row; "position" is the layer's `positions=`, as for `Chunked`; "distance" is the order,
    for masks that read only q - k; "sequence" is for masks that read only which of them is first,
    "nothing" for masks that read neither, and "slot" for slots. A class with an array along q or k
    declares it by field name, `AXES = {"array": "bnqk"}`, and is evaluated at slots.

    A static mask may compute its results in Python, numpy or jax.numpy. Any other mask is traced,
    on blocks of queries whose start is traced, so it must use jax.numpy.

    Raises:
      NotImplementedError: in use, by a subclass that does not define `__call__`.
      TypeError: for `and`, `or` and `not`; in use, by a subclass that is not decorated, or that
        returns a value of the wrong form.

    Source: `mask_mod` of torch's flex attention; the algebra is our own.

    >>> from flax_attn import Mask, frozen
    >>> @frozen
    ... class EveryOther(Mask):
    ...     start: int
    ...     def __call__(self, b, n, q, k):
    ...         return (q - k) % 2 == self.start
    >>> EveryOther(0)(0, 0, 2, np.arange(4)).tolist()
    [True, False, True, False]
    >>> from flax_attn import CAUSAL, Window
    >>> (CAUSAL & ~Window(0, 0))(0, 0, 2, np.arange(4)).tolist()  # the past alone
    [True, True, False, False]
    """

    __array_ufunc__ = None  # so that `array & mask` calls `mask.__rand__`
    reads: str = "order"

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask is neither true nor false: `and`, `or`, `not` would drop one; use &, | and ~."
        )

    @cached_property
    def is_static(self) -> bool:
        """Whether the mask depends on no array, batch entry or head."""
        parts = (part for part in vars(self).values() if isinstance(part, Mask))
        declared = hasattr(self, "AXES")
        return declared and all(part.is_static for part in parts) and not jax.tree.leaves(self)

    @cached_property
    def shows_later(self) -> bool | None:
        """Whether a query may attend to later keys; None if that depends on where they are."""
        band = self.bind(Sizes((), 1, 1, 1)).as_band() if self.is_static else None
        if band is None:
            return None
        if band.hi is not None and band.hi <= 0:
            return False
        return None if band.kv is not None else True

    def __call__(self, b: Any, n: Any, q: Any, k: Any) -> Any:
        """Whether query q of head n in batch entry b may attend to key k; arrays broadcast."""
        raise NotImplementedError

    def bind(self, sizes: Sizes) -> "Mask":
        """This mask for these sizes: checks shapes, flattens batch axes, resolves `"end"`."""
        is_users = not hasattr(self, "AXES") and type(self) in FROZEN
        return jax.tree.map(jnp.asarray, self) if is_users else self

    def at(self, places: Places) -> "Mask":
        """This mask for a shard whose batch entries and heads have global indices `places`.

        A class with `AXES` gets its shard of its arrays and local indices; any other keeps its
        arrays replicated and gets global indices. A static mask reads neither entry nor head.
        """
        return self if hasattr(self, "AXES") or self.is_static else Placed(self, places)

    def grid(self, sizes: Sizes) -> jax.Array:
        """The mask of a whole attention; broadcasts to B N T S. The mask must be bound."""
        return jnp.asarray(self(*sizes.iotas()))

    def key_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: no query of `range(*q)`, in any head, attends to a key outside.

        It is called once for all heads of a bound mask, with n = 0, and clipped to the keys.
        Backends pass `Rows`: a pair that may be traced, with a static `size`. With `q_positions`
        the pair spans the positions of a block, and has no `size`.
        """
        return 0, sizes.S

    def seen_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: every query of `range(*q)`, in every head, attends to every key inside.

        It is called as `key_range` is, and empty if `lo >= hi`.
        """
        return 0, 0

    def reach(self, keep_first: int = 0) -> int | None:
        """Number of past tokens it attends to, the token itself included; None if unbounded.

        The first `keep_first` tokens are not counted.
        """
        band = self.as_band()
        return None if band is None or band.lo is None else max(1 - band.lo, 0)

    def as_band(self) -> Band | None:
        """The bound mask as a band with lengths, or None if it is not one."""
        return None

    def as_runs(self, q: Any) -> tuple[Any, Any] | None:
        """First key and end of each query's contiguous range of keys; for a bound mask.

        The queries are `1 T`, the bounds `B|1 T`, or None if unbounded. None instead of the pair
        means that the visible keys of a query may not be contiguous. A range may be empty.
        """
        band = self.as_band()
        if band is None:
            return None
        first = None if band.lo is None else saturating_add(q, band.lo)
        end = None if band.hi is None else saturating_add(q, band.hi + 1)
        if band.kv is not None:
            kv = jnp.asarray(band.kv, jnp.int32).reshape(-1, 1)
            end = kv if end is None else jnp.minimum(end, kv)
        return first, end

    def as_segments(self) -> tuple[Any, Any] | None:
        """Ids of queries, `B T`, and keys, `B S`; a query attends to keys of equal id. Or None.

        For a bound mask.
        """
        return None

    def real_tokens(self, shape: tuple[int, ...]) -> jax.Array:
        """Which tokens of `*B T` are real, for `valid=`: of `Lengths(n)` and `~Lengths(padding)`.

        Raises:
          TypeError: for another mask.
          ValueError: if its numbers do not broadcast to `*B`.
        """
        raise TypeError(
            "valid takes a boolean array, True for non-padding tokens, Lengths(n) for padding "
            f"after the first n tokens, or ~Lengths(n) for n tokens of padding before; got {self}."
        )

    def static(self, sizes: Sizes) -> np.ndarray | None:
        """The mask as a T S numpy array, if it is static."""
        if not self.is_static:
            return None
        _, _, q, k = sizes.grid()
        with jax.ensure_compile_time_eval():
            visible = self.bind(sizes)(0, 0, q.reshape(-1, 1), k.reshape(1, -1))
        return np.broadcast_to(np.asarray(visible), (sizes.T, sizes.S))

    def __and__(self, other: "Mask | jax.Array") -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: "Mask | jax.Array") -> "Mask":
        return Or(self, as_mask(other))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> "Mask":
        return Not(self)


@frozen
class Dense(Mask):
    """A boolean array that broadcasts to `*B N T S`; True means "may attend".

    Also called: boolean attention mask, `attn_mask`.

    Args:
      array: booleans. If True masks a key, as in torch's `key_padding_mask`, use `~Dense(array)`.

    Raises:
      TypeError: if `array` is not boolean.
      ValueError: in use, if it does not broadcast to `*B N T S`.

    Source: `attn_mask` of torch's scaled_dot_product_attention.

    >>> Dense(np.eye(4, dtype=bool)[None, None])(0, 0, 2, np.arange(4)).tolist()
    [False, False, True, False]
    """

    array: Any

    AXES: ClassVar = {"array": "bnqk"}
    is_static = False  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        check_boolean(self.array)

    def bind(self, sizes):
        return Dense(to_grid("A mask", self.array, sizes))

    def __call__(self, b, n, q, k):
        return look_up(self.array, b, n, q, k)

    def grid(self, sizes):
        return jnp.asarray(self.array)


@frozen
class Placed(Mask):
    """A mask without `AXES` in a shard, evaluated at global indices."""

    mask: Mask
    places: Places

    def at(self, places):
        return Placed(self.mask, places)

    def bind(self, sizes):
        return Placed(self.mask.bind(sizes), self.places)

    def __call__(self, b, n, q, k):
        return self.mask(*in_whole(self.places, b, n), q, k)

    def key_range(self, b, n, q, sizes):
        return visible_range(self.mask, self._entry(b), q, sizes)

    def seen_range(self, b, n, q, sizes):
        return fully_visible_range(self.mask, self._entry(b), q, sizes)

    def as_band(self):
        return self._of_entries(as_known_band(self.mask))

    def as_runs(self, q):
        return self._of_entries(runs_of(self.mask, q))

    def as_segments(self):
        return self._of_entries(segments_of(self.mask))

    def _entry(self, b):
        return in_whole(self.places, b, 0)[0]

    def _of_entries(self, answer):
        def here(x):
            return x if jnp.ndim(x) == 0 or len(x) == 1 else jnp.asarray(x)[self.places.b]

        return jax.tree.map(here, answer)


@frozen
class And(Mask):
    """True where both masks are True."""

    a: Mask
    b: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return And(self.a.bind(sizes), self.b.bind(sizes))

    def at(self, places):
        return And(self.a.at(places), self.b.at(places))

    @cached_property
    def shows_later(self):
        parts = self.a.shows_later, self.b.shows_later
        return all(parts) if False in parts or all(parts) else None

    def __call__(self, b, n, q, k):
        return self.a(b, n, q, k) & self.b(b, n, q, k)

    def grid(self, sizes):
        return self.a.grid(sizes) & self.b.grid(sizes)

    def key_range(self, b, n, q, sizes):
        one, two = visible_range(self.a, b, q, sizes), visible_range(self.b, b, q, sizes)
        return maximum(one[0], two[0]), minimum(one[1], two[1])

    def seen_range(self, b, n, q, sizes):
        one, two = (fully_visible_range(x, b, q, sizes) for x in (self.a, self.b))
        return maximum(one[0], two[0]), minimum(one[1], two[1])

    def reach(self, keep_first=0):
        parts = (reach_of(x, keep_first) for x in (self.a, self.b))
        return min((n for n in parts if n is not None), default=None)

    def as_band(self):
        one, two = as_known_band(self.a), as_known_band(self.b)
        return None if one is None or two is None else one.combine(two)

    def as_runs(self, q):
        one, two = runs_of(self.a, q), runs_of(self.b, q)
        if one is None or two is None:
            return None
        return tuple(map(combine, (jnp.maximum, jnp.minimum), one, two))


@frozen
class Or(Mask):
    """True where either mask is True."""

    a: Mask
    b: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return Or(self.a.bind(sizes), self.b.bind(sizes))

    def at(self, places):
        return Or(self.a.at(places), self.b.at(places))

    @cached_property
    def shows_later(self):
        parts = self.a.shows_later, self.b.shows_later
        return any(parts) if True in parts or None not in parts else None

    def __call__(self, b, n, q, k):
        return self.a(b, n, q, k) | self.b(b, n, q, k)

    def grid(self, sizes):
        return self.a.grid(sizes) | self.b.grid(sizes)

    def reach(self, keep_first=0):
        one, two = reach_of(self.a, keep_first), reach_of(self.b, keep_first)
        return None if one is None or two is None else max(one, two)

    def key_range(self, b, n, q, sizes):
        one, two = visible_range(self.a, b, q, sizes), visible_range(self.b, b, q, sizes)
        none, other = one[0] >= one[1], two[0] >= two[1]  # an empty range may lie anywhere
        lo = select(none, two[0], select(other, one[0], minimum(one[0], two[0])))
        return lo, select(none, two[1], select(other, one[1], maximum(one[1], two[1])))

    def seen_range(self, b, n, q, sizes):
        one, two = (fully_visible_range(x, b, q, sizes) for x in (self.a, self.b))
        return _longer(one, two)

    def as_runs(self, q):
        """One range if both start at key 0 and mask no query, as `CAUSAL | Prefix(n)`."""
        ends = []
        for part in (self.a, self.b):
            band, runs = as_known_band(part), runs_of(part, q)
            if band is None or runs is None or band.lo is not None or band.rows is not None:
                return None
            ends.append(runs[1])
        return None, None if any(x is None for x in ends) else jnp.maximum(*ends)


@frozen
class Not(Mask):
    """True where the mask is False."""

    a: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return Not(self.a.bind(sizes))

    def at(self, places):
        return Not(self.a.at(places))

    def __call__(self, b, n, q, k):
        return ~self.a(b, n, q, k)

    def real_tokens(self, shape):
        return ~self.a.real_tokens(shape)

    def grid(self, sizes):
        return ~self.a.grid(sizes)

    def key_range(self, b, n, q, sizes):
        """Excludes masked keys at one end, but not in the middle."""
        lo, hi = fully_visible_range(self.a, b, q, sizes)
        some, S = lo < hi, sizes.S
        return select(some & (lo <= 0), hi, 0), select(some & (hi >= S), lo, S)

    def seen_range(self, b, n, q, sizes):
        """The keys before all that `a` may show, or after, whichever are more."""
        lo, hi = visible_range(self.a, b, q, sizes)
        lo, hi = select(lo < hi, lo, sizes.S), select(lo < hi, hi, sizes.S)
        return _longer((0, lo), (hi, sizes.S))

    def as_runs(self, q):
        """The keys after `Lengths(n)`, which is padding at the left."""
        first = padding_before(self)
        return None if first is None else (jnp.asarray(first, jnp.int32).reshape(-1, 1), None)


def _longer(one: Range, two: Range) -> Range:
    first = one[1] - one[0] >= two[1] - two[0]
    return select(first, one[0], two[0]), select(first, one[1], two[1])


def as_mask(mask: Any) -> Mask:
    """Wraps a boolean array in `Dense`; returns a mask as it is; else raises TypeError."""
    return mask if isinstance(mask, Mask) else Dense(mask)


def parts_of(mask: Mask) -> list[Mask]:
    """The operands of nested `&`, as a list."""
    return [*parts_of(mask.a), *parts_of(mask.b)] if isinstance(mask, And) else [mask]


def padding_before(mask: Mask) -> Any:
    """The number of keys that a bound `~Lengths(n)` masks at the left, or None for another mask."""
    band = as_known_band(mask.a) if isinstance(mask, Not) else None
    if band is None or not band.lo is band.hi is band.rows is None:
        return None
    return band.kv


def check_array(name: str, array: Any) -> None:
    """Raises TypeError for a mask object where only arrays are accepted."""
    if isinstance(array, Mask):
        raise TypeError(
            f"{name} must be an array in this function; got {array}, which flax_attn.attend takes."
        )
