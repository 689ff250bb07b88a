"""What every mask can do: the base of all masks, `&`, `|` and `~`, and boolean arrays as masks.

The masks themselves are in `masks`, which brings these names too.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays import check_boolean, look_up, to_grid
from .._types import Sizes, frozen, is_frozen
from ..places import Places, in_whole

Range = tuple[Any, Any]


class Mask:
    """The base of all masks. A subclass says which (b, n, q, k) may look; the rest has defaults.

    A subclass of your own is decorated with `flax_attn.frozen`, which makes it a dataclass, a
    pytree of its arrays, and equal by value. Every backend then takes it. Two answers make it
    faster: `is_static = True` if it asks neither for b nor for n and holds no array, and a
    `key_range`, by which blocks of keys that nobody sees are skipped. `&`, `|` and `~` combine
    masks, and masks with boolean arrays.

    Raises:
      NotImplementedError: in use, by a subclass that does not say what it hides.
      TypeError: for `and`, `or` and `not`; in use, by a subclass that is not decorated.

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

    def __bool__(self) -> bool:
        raise TypeError(
            "A mask is neither true nor false: `and`, `or`, `not` would drop one; use &, | and ~."
        )

    @property
    def is_static(self) -> bool:
        """Whether the mask is known without any array, batch entry or head."""
        parts = (part for part in vars(self).values() if isinstance(part, Mask))
        declared = hasattr(self, "AXES")
        return declared and not jax.tree.leaves(self) and all(part.is_static for part in parts)

    def __call__(self, b: Any, n: Any, q: Any, k: Any) -> Any:
        """Whether query q of head n in batch entry b may look at key k; index arrays broadcast."""
        raise NotImplementedError

    def bind(self, sizes: Sizes) -> "Mask":
        """This mask for these sizes: shapes checked, batch axes as one, `"end"` as a number."""
        given = is_frozen(type(self)) and not hasattr(self, "AXES")
        return jax.tree.map(jnp.asarray, self) if given else self

    def at(self, places: Places) -> "Mask":
        """This mask for a shard whose batch entries and heads stand at `places` in the whole.

        A class with `AXES` is given its own part of its arrays and asked by the shard's numbers;
        any other keeps its arrays whole and is asked by the numbers of the whole.
        """
        return self if hasattr(self, "AXES") else Placed(self, places)

    def grid(self, sizes: Sizes) -> jax.Array:
        """The mask of a whole attention; broadcasts to B N T S. The mask must be bound."""
        return jnp.asarray(self(*sizes.iotas()))

    def key_range(self, b: Any, n: Any, q: Range, sizes: Sizes) -> Range:
        """`lo, hi`: no query of `range(*q)` may look at a key outside it. Conservative."""
        return 0, sizes.S

    def static(self, sizes: Sizes) -> np.ndarray | None:
        """The mask as a T S numpy array, if it is static."""
        if not self.is_static:
            return None
        _, _, q, k = sizes.grid()
        with jax.ensure_compile_time_eval():
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
class Dense(Mask):
    """A boolean array that broadcasts to `*B N T S`; True may look.

    Args:
      array: booleans. What hides with True, as torch's `key_padding_mask`, is `~Dense(array)`.

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

    @property
    def is_static(self):
        return self.mask.is_static

    def at(self, places):
        return Placed(self.mask, places)

    def bind(self, sizes):
        return Placed(self.mask.bind(sizes), self.places)

    def __call__(self, b, n, q, k):
        return self.mask(*in_whole(self.places, b, n), q, k)

    def key_range(self, b, n, q, sizes):
        return self.mask.key_range(*in_whole(self.places, b, n), q, sizes)


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


def as_mask(mask: Any) -> Mask:
    """A mask from a mask or a boolean array; a TypeError names both conventions otherwise."""
    return mask if isinstance(mask, Mask) else Dense(mask)


def check_array(name: str, given: Any) -> None:
    """TypeError for a mask object where another library's function takes arrays alone."""
    if isinstance(given, Mask):
        raise TypeError(
            f"{name} must be an array in this function; got {given}, which flax_attn.attend takes."
        )
