"""Layouts: the order of tokens along a sharded length.

Of eight tokens on two shards:

    contiguous   0 1 2 3 | 4 5 6 7     one contiguous range each
    zigzag       0 1 6 7 | 2 3 4 5     one range from the front and one from the back each
    striped      0 2 4 6 | 1 3 5 7     every second token each

Under a causal mask a late token attends to more keys than an early one. Contiguous shards then have
unequal work, and all wait for the last; zigzag and striped shards are nearly balanced.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ._internal.checks import check_choice, check_positive

TOKEN_LAYOUTS = ("contiguous", "zigzag", "striped")


class Context(NamedTuple):
    """Strategy and layout of attention over a sharded length."""

    strategy: str | tuple[str, ...] = "all_gather"
    layout: str = "contiguous"


class Named(NamedTuple):
    """Mesh axes by name, for arrays whose types carry no sharding.

    Attributes:
      mesh: None for the one that `jax.set_mesh` sets.
      batch, heads, length: a mesh axis, several of them, or None.
    """

    mesh: Any
    batch: "Axes"
    heads: "Axes"
    length: "Axes"


Axes = str | tuple[str, ...] | None  # mesh axes that shard one array axis
requested_context = jax.make_user_context(Context())  # by `sharding.context_parallel`
named = jax.make_user_context(None)  # by `sharding.on`


def named_for(x: Any) -> Named | None:
    """The named mesh axes, for an array whose type carries no sharding; else None."""
    axes = named.value
    if axes is None or _type_is_sharded(x):
        return None
    if axes.mesh is not None:
        return axes
    return axes._replace(mesh=jax.sharding.get_abstract_mesh())


def _type_is_sharded(x: Any) -> bool:
    """Whether an array's type carries its sharding, or it is a shard inside `shard_map`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return AxisType.Explicit in getattr(getattr(x.sharding, "mesh", None), "axis_types", ())
    kind = jax.typeof(x)
    return AxisType.Explicit in kind.sharding.mesh.axis_types or bool(kind.manual_axis_type.varying)


def names_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec, as a tuple."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def partitioning(entry: Any, mesh: Any) -> list[str]:
    """The mesh axes in `entry` of size greater than 1, which shard the dimension."""
    return [name for name in names_in(entry) if mesh.shape.get(name, 1) > 1]


def place(x: Any, shards: int, layout: str, *, axis: int) -> Any:
    """Permutes the tokens along `axis` to a layout; numpy in, numpy out.

    Apply it to every array with one entry per token, before sharding: tokens, labels, document
    ids, masks and biases by slot.

    Args:
      x: any array; `axis` is its axis of tokens.
      shards: number of devices over which that axis will be sharded.
      layout: "contiguous", "zigzag" or "striped".

    Raises:
      ValueError: for another layout, or a length that the shards do not divide.

    >>> place(np.arange(8), 2, "zigzag", axis=0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    x, axis = _split_of(x, shards, layout, axis)
    if layout == "contiguous":
        return x
    if layout == "striped":
        return _split(x, axis, -1, shards).swapaxes(axis, axis + 1).reshape(x.shape)
    first, last = (_at(_split(x, axis, 2, shards, -1), axis, i) for i in (0, 1))
    return _module(x).stack((first, _reversed(last, axis)), axis + 1).reshape(x.shape)


def unplace(x: Any, shards: int, layout: str, *, axis: int) -> Any:
    """Restores the order of the tokens along `axis`; inverse of `place`.

    Args:
      x, shards, layout, axis: as in `place`.

    Raises:
      ValueError: as `place` does.

    >>> unplace(np.asarray([0, 1, 6, 7, 2, 3, 4, 5]), 2, "zigzag", axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    x, axis = _split_of(x, shards, layout, axis)
    if layout == "contiguous":
        return x
    if layout == "striped":
        return _split(x, axis, shards, -1).swapaxes(axis, axis + 1).reshape(x.shape)
    first, last = (_at(_split(x, axis, shards, 2, -1), axis + 1, i) for i in (0, 1))
    return _module(x).concatenate((first, _reversed(last, axis)), axis).reshape(x.shape)


def positions(length: int, shards: int, layout: str) -> np.ndarray:
    """The token in each slot of a layout, int32, for computations from positions.

    `Rotary` does this automatically.

    Args:
      length: number of tokens.
      shards, layout: as in `place`.

    Raises:
      ValueError: as `place` does.

    >>> positions(8, 2, "striped").tolist()
    [0, 2, 4, 6, 1, 3, 5, 7]
    """
    slots, _ = _split_of(np.arange(length, dtype=np.int32), shards, layout, 0)
    return tokens_in(slots, length, shards, layout)


def tokens_in(slots: Any, length: int, shards: int, layout: str) -> Any:
    """The tokens in these slots; numpy in, numpy out. `shards` must divide `length`."""
    if layout == "contiguous":
        return slots
    each = length // shards
    shard, i = slots // each, slots % each
    if layout == "striped":
        return i * shards + shard
    run = each // 2  # length of the front and the back range
    return _module(slots).where(i < run, shard * run + i, (2 * shards - 2 - shard) * run + i)


def positions_of(x: Any, axis: int) -> np.ndarray | None:
    """The token in each slot of an array sharded along `axis`, by the requested layout.

    None if tokens are in order: for "contiguous", or without a sharding in the type or from
    `sharding.on`.
    """
    layout = requested_context.value.layout
    if layout == "contiguous":
        return None
    by_name, sharding = named_for(x), jax.typeof(x).sharding
    if by_name is not None:
        mesh, entry = by_name.mesh, by_name.length
    else:
        mesh, entry = sharding.mesh, sharding.spec[axis] if len(sharding.spec) == x.ndim else None
    shards = math.prod(mesh.shape[name] for name in partitioning(entry, mesh))
    return positions(x.shape[axis], shards, layout) if shards > 1 else None


def check_length(name: str, length: int, shards: int, layout: str) -> None:
    """Raises ValueError unless a layout can split this length; suggests valid lengths."""
    parts = 2 * shards if layout == "zigzag" else shards
    if length % parts:
        less = length // parts * parts
        suggestion = f"{less} or {less + parts}" if less else str(parts)
        of = f"twice the {shards} shards" if parts > shards else f"the {shards} shards"
        raise ValueError(
            f'layout "{layout}" needs a length that {of} divide; {name} has {length} tokens: '
            f"pad or cut it to {suggestion}."
        )


def _split_of(x: Any, shards: int, layout: str, axis: int) -> tuple[Any, int]:
    check_choice("layout", layout, *TOKEN_LAYOUTS)
    check_positive(shards=shards)
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of the {x.ndim} of the array; got {axis}.")
    check_length("the array", x.shape[axis], shards, layout)
    return x, axis % x.ndim


def _module(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def _split(x: Any, axis: int, *counts: int) -> Any:
    """Splits one axis into several; one of the counts may be -1."""
    known = -int(np.prod(counts))
    counts = tuple(x.shape[axis] // known if n == -1 else n for n in counts)
    return x.reshape(*x.shape[:axis], *counts, *x.shape[axis + 1 :])


def _at(x: Any, axis: int, i: int) -> Any:
    return x[(*(slice(None),) * axis, i)]


def _reversed(x: Any, axis: int) -> Any:
    return _module(x).flip(x, axis)
