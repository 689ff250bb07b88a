"""What every mask can do: the base of all masks, `&`, `|` and `~`, and boolean arrays."""

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
from .._internal.types import Sizes, frozen, is_frozen
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


class Mask:
    """The base of all masks. A subclass says which (b, n, q, k) may look; the rest has defaults.

    Decorate your own subclass with `flax_attn.frozen`, which makes it a dataclass, a pytree of its
    arrays, and equal by value. Every backend in plain JAX then takes it. Set `is_static = True` if
    it uses neither b nor n and holds no array. If you define `key_range` and `seen_range`, fully
    masked blocks are skipped, and fully visible blocks are not masked. The kernels of other
    libraries take masks that define `as_band`, `as_runs` or `as_segments`. `&`, `|` and `~` combine
    masks, also with boolean arrays.

    Beside padding and packed documents a layer asks a mask at numbers other than slots, as `reads`
    says: "order", the default, is a token's number among the real tokens of its row; "position" is
    that of the layer's `positions=`, as for `Chunked`; "distance" is the order of a mask that reads
    q - k alone; "sequence" is for one that reads which of them comes first, "nothing" for one that
    reads neither, and "slot" for one that means slots. A class with an array along q or k says so
    by the name of the field, `AXES = {"array": "bnqk"}`, and goes by slot.

    A static mask may compute its answers in Python, numpy or jax.numpy. Any other mask runs inside
    a program, on blocks of queries whose place is traced, so it must use jax.numpy.

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

    __array_ufunc__ = None  # numpy then leaves `array & mask` to the mask
    reads: str = "order"

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask is neither true nor false: `and`, `or`, `not` would drop one; use &, | and ~."
        )

    @cached_property
    def is_static(self) -> bool:
        """Whether the mask is known without any array, batch entry or head."""
        parts = (part for part in vars(self).values() if isinstance(part, Mask))
        declared = hasattr(self, "AXES")
        return declared and not jax.tree.leaves(self) and all(part.is_static for part in parts)

    @cached_property
    def shows_later(self) -> bool:
        """Whether it is known without any array that a token sees some that come after it."""
        band = self.bind(Sizes((), 1, 1, 1)).as_band() if self.is_static else None
        return band is not None and (band.hi is None or band.hi > 0)

    def __call__(self, b: Any, n: Any, q: Any, k: Any) -> Any:
        """Whether query q of head n in batch entry b may look at key k; index arrays broadcast."""
        raise NotImplementedError

    def bind(self, sizes: Sizes) -> "Mask":
        """This mask for these sizes: shapes checked, batch axes as one, `"end"` as a number."""
        is_users = is_frozen(type(self)) and not hasattr(self, "AXES")
        return jax.tree.map(jnp.asarray, self) if is_users else self

    def at(self, places: Places) -> "Mask":
        """This mask for a shard whose batch entries and heads stand at `places` in the whole.

        A class with `AXES` is given its own part of its arrays and asked by the shard's numbers;
        any other keeps its arrays whole and is asked by the numbers of the whole. A static mask
        asks for neither entry nor head.
        """
        return self if hasattr(self, "AXES") or self.is_static else Placed(self, places)

    def grid(self, sizes: Sizes) -> jax.Array:
        """The mask of a whole attention; broadcasts to B N T S. The mask must be bound."""
        return jnp.asarray(self(*sizes.iotas()))

    def key_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: no query of `range(*q)` may look at a key outside, whichever its head.

        A bound mask is asked once for all heads, with n = 0, and what lies beyond the keys is cut
        off. Backends ask for `Rows`: a pair that may be traced, whose `size` is a number. At
        `q_positions` the pair holds the least and most of a block's positions, and has no `size`.
        """
        return 0, sizes.S

    def seen_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: every query of `range(*q)` may look at every key inside, whichever its head.

        Asked as `key_range` is, and empty if `lo >= hi`.
        """
        return 0, 0

    def reach(self, keep_first: int = 0) -> int | None:
        """How many tokens back it looks, the token itself included; None if that has no limit.

        The first `keep_first` tokens are not counted.
        """
        band = self.as_band()
        return None if band is None or band.lo is None else max(1 - band.lo, 0)

    def as_band(self) -> Band | None:
        """The bound mask as a band with lengths, or None if it is none."""
        return None

    def as_runs(self, q: Any) -> tuple[Any, Any] | None:
        """First key and end of the one run that each query sees, if it sees any; of a bound mask.

        The queries are `1 T`, the ends `B|1 T`, or None where nothing is cut off. None in place of
        both says that a query may see several runs.
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
        """Ids of queries, `B T`, and of keys, `B S`, that look if they are equal; None if not so.

        Of a bound mask.
        """
        return None

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
    """A boolean array that broadcasts to `*B N T S`; True may look.

    Also called: boolean attention mask, `attn_mask`.

    Args:
      array: booleans. If True hides a key, as in torch's `key_padding_mask`, use `~Dense(array)`.

    Raises:
      TypeError: if `array` is not boolean.
      ValueError: in use, if it does not broadcast to `*B N T S`.

    Source: `attn_mask` of torch's scaled_dot_product_attention.

    >>> Dense(np.eye(4, dtype=bool)[None, None])(0, 0, 2, np.arange(4)).tolist()
    [False, False, True, False]
    """

    array: Any

    AXES: ClassVar = {"array": "bnqk"}

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
    """A mask that knows nothing of shards, asked by the numbers of the whole."""

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
    """Both let it look."""

    a: Mask
    b: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return And(self.a.bind(sizes), self.b.bind(sizes))

    def at(self, places):
        return And(self.a.at(places), self.b.at(places))

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
    """Either lets it look."""

    a: Mask
    b: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return Or(self.a.bind(sizes), self.b.bind(sizes))

    def at(self, places):
        return Or(self.a.at(places), self.b.at(places))

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
        """One run if both begin with the first key and hide no query, as `CAUSAL | Prefix(n)`."""
        ends = []
        for part in (self.a, self.b):
            band, runs = as_known_band(part), runs_of(part, q)
            if band is None or runs is None or band.lo is not None or band.rows is not None:
                return None
            ends.append(runs[1])
        return None, None if any(x is None for x in ends) else jnp.maximum(*ends)


@frozen
class Not(Mask):
    """What the other hides."""

    a: Mask

    AXES: ClassVar = {}

    def bind(self, sizes):
        return Not(self.a.bind(sizes))

    def at(self, places):
        return Not(self.a.at(places))

    def __call__(self, b, n, q, k):
        return ~self.a(b, n, q, k)

    def grid(self, sizes):
        return ~self.a.grid(sizes)

    def key_range(self, b, n, q, sizes):
        """What is hidden at one end is cut off; a hole in the middle is not."""
        lo, hi = fully_visible_range(self.a, b, q, sizes)
        some, S = lo < hi, sizes.S
        return select(some & (lo <= 0), hi, 0), select(some & (hi >= S), lo, S)

    def seen_range(self, b, n, q, sizes):
        """What lies before all that the other may show, or behind it, whichever is more."""
        lo, hi = visible_range(self.a, b, q, sizes)
        lo, hi = select(lo < hi, lo, sizes.S), select(lo < hi, hi, sizes.S)
        return _longer((0, lo), (hi, sizes.S))


def _longer(one: Range, two: Range) -> Range:
    first = one[1] - one[0] >= two[1] - two[0]
    return select(first, one[0], two[0]), select(first, one[1], two[1])


def as_mask(mask: Any) -> Mask:
    """A mask from a mask or a boolean array; a TypeError names both conventions otherwise."""
    return mask if isinstance(mask, Mask) else Dense(mask)


def parts_of(mask: Mask) -> list[Mask]:
    """The masks that were put together by `&`."""
    return [*parts_of(mask.a), *parts_of(mask.b)] if isinstance(mask, And) else [mask]


def check_array(name: str, array: Any) -> None:
    """TypeError for a mask object where another library's function takes only arrays."""
    if isinstance(array, Mask):
        raise TypeError(
            f"{name} must be an array in this function; got {array}, which flax_attn.attend takes."
        )
