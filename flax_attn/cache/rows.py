"""Shared by all caches: batch axes, positions of new tokens, and operations on rows."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .._internal.arrays import vmap_leading
from .._internal.checks import check_positive, valid_tokens
from ..masks import Mask
from ..sharding.specs import spec_of
from .meshes import explicit_mesh, fitting, gathered, mesh_of_sharded, resharded

C = TypeVar("C")


def batch_axes(batch: int | tuple[int, ...], layers: int | None) -> tuple[int, ...]:
    """Leading axes of a cache: the layers, if several are stacked, and the batch.

    Raises:
      ValueError: for a count that is no whole number of at least 1.

    >>> batch_axes(2, None), batch_axes((2, 3), 4), batch_axes((), None)
    ((2,), (4, 2, 3), ())
    """
    axes = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    check_positive(**{f"batch[{i}]": count for i, count in enumerate(axes)})
    if layers is None:
        return axes
    check_positive(layers=layers)
    return (layers, *axes)


def next_positions(
    length: Int[Array, "*B"], T: int, valid: Bool[Array, "*#B T"] | Mask | None
) -> Int[Array, "*B T"]:
    """Positions of T tokens after `length` others, -1 for those that are not valid.

    >>> next_positions(jnp.asarray([3]), 3, jnp.asarray([[False, True, True]])).tolist()
    [[-1, 3, 4]]
    """
    shape = (*length.shape, T)
    if valid is None:
        return length[..., None] + jax.lax.broadcasted_iota(jnp.int32, shape, length.ndim)
    token_mask = valid_tokens("valid", valid, shape)
    counts = jnp.cumsum(token_mask, -1, dtype=jnp.int32)  # *B T
    return jnp.where(token_mask, length[..., None] + counts - 1, -1)


def counted(count: int, rows: int) -> Int[Array, "... count"]:
    """0, 1, 2, ... along the last axis, after `rows` axes of length one."""
    return jnp.arange(count, dtype=jnp.int32).reshape((1,) * rows + (count,))


def put(x: jax.Array, slots: jax.Array, new: jax.Array, heads: bool = True) -> jax.Array:
    """Writes `new`, `*B T K ...`, to the `slots`, `*B T`, of `x`, `*B K S ...`.

    Slots beyond the last are dropped. Without heads both arrays lack the axis K. A donated `x` is
    updated in place, and sharded rows and heads need no communication. Tokens that are sharded in
    another way than `x` are brought to its rows and heads.
    """
    mesh = explicit_mesh((x, slots, new))
    if mesh is not None:
        rows, head = spec_of(x)[: slots.ndim - 1], spec_of(x)[slots.ndim - 1]
        slots = resharded(slots, mesh, *rows)
        new = resharded(new, mesh, *rows, None, *([head] if heads else []))

    def row(x: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
        if heads:
            return x.at[:, slots].set(jnp.swapaxes(new, 0, 1), mode="drop")
        return x.at[slots].set(new, mode="drop")

    return vmap_leading(row, slots.ndim - 1)(x, slots, new.astype(x.dtype))


def check_room(slots: int, new: jax.Array) -> None:
    """Raises ValueError, for concrete lengths, if a row would need more slots than there are."""
    if not isinstance(new, Tracer) and (new > slots).any():
        row = first_row(new > slots)
        need = int(np.asarray(new)[row])
        raise ValueError(
            f"The cache holds {slots} tokens a row; row {row} would need {need}. Make a longer "
            "one, or one with window= for a mask that looks no further back."
        )


def check_overflow(overflowed: jax.Array, slots: int) -> None:
    """Raises ValueError, naming the rows, if any has overflowed."""
    if overflowed.any():
        rows = np.argwhere(np.asarray(overflowed)).tolist()
        rows = [row[0] if len(row) == 1 else tuple(row) for row in rows]
        raise ValueError(
            f"The cache holds {slots} tokens a row; rows {rows} were given more, or would have "
            "written into a page that another row holds, and their outputs are NaN since. `reset` "
            "empties them."
        )


def check_like(cache: Any, other: Any) -> None:
    """Raises ValueError unless `other` is the same kind of cache with one row."""
    if jax.tree.structure(cache) != jax.tree.structure(other):
        raise ValueError(
            "insert takes a cache of the same kind, with the same window, keep_first, spare and "
            f"store, and one row, {_kind(cache)}; got {_kind(other)}."
        )
    for mine, its in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        if its.shape != (1, *mine.shape[1:]) or its.dtype != mine.dtype:
            raise ValueError(
                f"insert takes a {type(cache).__name__} of one row that fits "
                f"{mine.dtype}{list(mine.shape)}; got {its.dtype}{list(its.shape)}."
            )


def _kind(cache: Any) -> str:
    """Description of a cache's type and settings, without its sizes."""
    names = ("window", "keep_first", "spare", "store")
    settings = [f"{n}={getattr(cache, n)}" for n in names if getattr(cache, n, None)]
    return f"{type(cache).__name__}({', '.join(settings)})"


def rows_to_take(rows: Any, count: int) -> Int[Array, " R"]:
    """Validated row indices along the first batch axis.

    Raises:
      TypeError: if they are not integers.
      ValueError: outside jit, for an index out of range.
    """
    rows = jnp.asarray(rows)
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise TypeError(
            f"take goes by the numbers of rows, such as [2, 0, 0]; got {rows.dtype}. "
            "jnp.flatnonzero makes numbers of True and False."
        )
    if not isinstance(rows, Tracer) and ((rows < -count) | (rows >= count)).any():
        raise ValueError(f"There are {count} rows, from 0 on; take was given {rows.tolist()}.")
    return rows


def taken(cache: C, rows: Any, count: int) -> C:
    """Selects `rows` of the `count` rows along the first batch axis, in this order.

    Raises:
      TypeError, ValueError: as `rows_to_take` does.
    """
    rows = gathered(rows_to_take(rows, count))
    mesh = mesh_of_sharded(cache)

    def take(x: jax.Array) -> jax.Array:
        if mesh is None:
            return jnp.take(x, rows, axis=0)
        spec = fitting(spec_of(x), (rows.size, *x.shape[1:]), mesh)
        return x.at[rows].get(mode="fill", out_sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(take, cache)


def inserted(cache: C, row: Any, other: Any, count: int) -> C:
    """The cache with one of its `count` rows replaced by `other`, a cache of one row.

    Raises:
      ValueError: if `other` differs in anything but the number of rows, or has not one; outside
        jit, if there is no such row.
    """
    check_like(cache, other)
    check_row(row, count, "insert")
    row, mesh = jnp.asarray(row, jnp.int32), explicit_mesh((cache, other))

    def insert(x: jax.Array, y: jax.Array) -> jax.Array:
        if mesh is None:
            return jax.lax.dynamic_update_index_in_dim(x, y[0], row, 0)
        where = jax.NamedSharding(mesh, spec_of(x))
        y = resharded(y, mesh, None, *spec_of(x)[1:])
        return x.at[row].set(y[0], mode="clip", out_sharding=where)

    return jax.tree.map(insert, cache, other)


def rows_to_reset(rows: Any, batch: tuple[int, ...]) -> Bool[Array, "*B"]:
    """Validated boolean mask of the rows to empty.

    Raises:
      TypeError: if they are not boolean, such as row indices.
      ValueError: if they do not broadcast to `*B`.
    """
    rows = jnp.asarray(rows)
    if rows.dtype != jnp.bool_:
        raise TypeError(
            f"reset takes True for each row that is to be emptied, *B = {batch}; got {rows.dtype}."
        )
    return _of_rows("reset takes True or False", rows, batch)


def truncated_lengths(
    requested: Any, length: Int[Array, "*B"]
) -> tuple[Int[Array, "*B"], Bool[Array, "*B"]]:
    """New length of each row, and the rows whose requested length is invalid.

    Raises:
      ValueError: if the numbers do not broadcast to `*B`; outside jit, if one is below 0.
    """
    requested = jnp.asarray(requested, jnp.int32)
    requested = _of_rows("truncate takes a length", requested, length.shape)
    bad = requested < 0
    if not isinstance(bad, Tracer) and bad.any():
        raise ValueError(f"truncate takes a length of 0 or more; row {first_row(bad)} has less.")
    return jnp.minimum(length, jnp.maximum(requested, 0)), bad


def _of_rows(what: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Broadcasts `x` to one value for each row."""
    try:
        return jnp.broadcast_to(x, batch)
    except ValueError:
        raise ValueError(
            f"{what} for all rows, or one for each of {batch}; got shape {x.shape}."
        ) from None


def check_row(row: Any, count: int, method: str) -> None:
    """Raises ValueError for a concrete row index out of range."""
    if not isinstance(row, Tracer) and not -count <= int(row) < count:
        raise ValueError(f"There are {count} rows, from 0 on; {method} was given row {int(row)}.")


def first_row(bad: jax.Array) -> Any:
    """Index of the first True row: a number, or a tuple for several batch axes."""
    row = np.argwhere(np.asarray(bad))[0].tolist() if bad.ndim else []
    return row[0] if len(row) == 1 else tuple(row)
