"""Masks evaluated at positions of queries and keys instead of slots, for caches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._internal.arrays import INT32_MAX, clip, saturating_add, select
from .._internal.types import Sizes, frozen
from ..places import Positions, is_indexed_by_slot, refuse_end, with_end
from .algebra import And, Mask, Not, Or
from .ranges import Range, Rows, fully_visible_range, visible_range
from .runs import FULL


def at_positions(mask: Mask, positions: Positions) -> Mask:
    """Returns `mask` evaluated at bound positions, with absent keys masked.

    Parts with an array along queries or keys stay evaluated at slots. Absent keys are masked last,
    so that `~` does not make them visible.
    """
    moved = _moved(mask, positions)
    return moved if isinstance(moved, AtPositions) else AtPositions(FULL, positions) & moved


def presence_in(mask: Mask) -> Mask | None:
    """The part of an `at_positions` mask that masks absent keys; None for other masks."""
    if isinstance(mask, And):
        return presence_in(mask.a)
    if not isinstance(mask, AtPositions) or mask.positions.all_present:
        return None
    return AtPositions(FULL, mask.positions)


def at_positions_of(mask: Mask, positions_of: Callable[[Mask], Positions | None], end: Any) -> Mask:
    """Returns `mask` with each part evaluated at the positions that `positions_of` returns for it.

    None keeps slots for a part. `end` replaces `offset="end"` at positions.
    """
    if isinstance(mask, Not):
        return Not(at_positions_of(mask.a, positions_of, end))
    if isinstance(mask, And | Or):
        a, b = (at_positions_of(part, positions_of, end) for part in (mask.a, mask.b))
        if isinstance(mask, And) and isinstance(a, AtPositions) and isinstance(b, AtPositions):
            if a.positions is b.positions:
                return AtPositions(a.mask & b.mask, a.positions)  # one range query for both
        return type(mask)(a, b)
    positions = positions_of(mask)
    return mask if positions is None else AtPositions(with_end(mask, end), positions)


def leaves_of(mask: Mask) -> list[Mask]:
    """The operands of nested `&`, `|` and `~`, as a list."""
    if isinstance(mask, Not):
        return leaves_of(mask.a)
    return [*leaves_of(mask.a), *leaves_of(mask.b)] if isinstance(mask, And | Or) else [mask]


def _moved(mask: Mask, positions: Positions) -> Mask:
    """`mask` at positions; each part masks absent keys, but `~` may make them visible."""
    if isinstance(mask, Not):  # so that its longest range is one of slots
        return Not(_moved(mask.a, positions))
    if isinstance(mask, And | Or):
        a, b = (_moved(part, positions) for part in (mask.a, mask.b))
        if isinstance(mask, And) and isinstance(a, AtPositions) and isinstance(b, AtPositions):
            return AtPositions(a.mask & b.mask, positions)  # one range query for both
        return type(mask)(a, b)
    if not mask.is_static and is_indexed_by_slot(mask):
        return mask
    refuse_end(mask)
    return AtPositions(mask, positions)


@frozen
class AtPositions(Mask):
    """A mask evaluated at positions instead of slots.

    Queries and keys at negative positions are fully masked, unless `positions.all_present`.
    """

    mask: Mask
    positions: Positions

    is_static = False  # pyright: ignore[reportAssignmentType]

    def at(self, places):
        return AtPositions(self.mask.at(places), self.positions)

    def bind(self, sizes):
        return AtPositions(self.mask.bind(_unbounded_sizes(sizes)), self.positions.bind(sizes))

    def evaluate(self, b: Any, n: Any, q: Any, k: Any) -> Any:
        """Whether a query at position q may attend to a key at position k."""
        shown = self.mask(b, n, q, k)
        return shown if self.positions.all_present else (q >= 0) & (k >= 0) & shown

    def __call__(self, b, n, q, k):
        return self.evaluate(b, n, *self.positions.of(b, q, k))

    def grid(self, sizes):
        b, n, _, _ = sizes.iotas()
        return self.evaluate(b, n, *self.positions.grid)

    def key_range(self, b, n, q, sizes):
        """From the first to the last slot whose position may be visible to these queries.

        INT32_MAX has no successor to end a range: queries there may attend to every slot, and a
        key there is in every range.
        """
        if not isinstance(q, Rows):  # their number is not static
            return 0, sizes.S
        rows = self._row(self.positions.q, b, q)
        least, most = _ends(rows)
        first, end = visible_range(self.mask, b, (least, most), _unbounded_sizes(sizes))
        if self.positions.in_order:
            lo, hi = (jnp.asarray(clip(x, sizes.S), jnp.int32) for x in (first, end))
        else:
            keys = self._row(self.positions.k, b)
            inside = (keys >= first) & (keys < end) | (keys == INT32_MAX)
            if self.positions.all_present:  # ranges never include negative positions
                inside = inside | (keys < 0)
            lo, hi, _ = _slots(inside)
        none, reaches_end = least >= most, most == INT32_MAX
        if self.positions.all_present:
            none, reaches_end = False, reaches_end | (rows < 0).any()
        return select(reaches_end, 0, select(none, sizes.S, lo)), select(
            reaches_end, sizes.S, select(none, 0, hi)
        )

    def seen_range(self, b, n, q, sizes):
        """The slots visible to all queries, if they are contiguous and all queries present."""
        if not isinstance(q, Rows):
            return 0, 0
        rows, keys = self._row(self.positions.q, b, q), self._row(self.positions.k, b)
        least, most = _ends(rows)
        first, end = fully_visible_range(self.mask, b, (least, most), _unbounded_sizes(sizes))
        lo, hi, count = _slots((keys >= first) & (keys < end))
        whole = (rows >= 0).all() & (count == hi - lo) & (most < INT32_MAX)
        return select(whole, lo, 0), select(whole, hi, 0)

    def _row(self, positions: jax.Array, b: Any, rows: Rows | None = None) -> jax.Array:
        """The positions of one batch entry; with `rows`, only those of these queries."""
        row = positions[0 if positions.shape[0] == 1 else b]
        return row if rows is None else jax.lax.dynamic_slice_in_dim(row, rows[0], rows.size)


def _slots(inside: jax.Array) -> tuple[Any, Any, Any]:
    """The first slot inside, one past the last, and their number.

    Ranges of positions start at 0 or later, so absent keys are never inside.
    """
    slots = jnp.arange(len(inside), dtype=jnp.int32)
    lo = jnp.min(jnp.where(inside, slots, len(inside)))
    hi = jnp.max(jnp.where(inside, slots + 1, 0))
    return lo, hi, inside.sum(dtype=jnp.int32)


def _unbounded_sizes(sizes: Sizes) -> Sizes:
    """Sizes for a mask at positions, where any position may occur."""
    return sizes._replace(T=INT32_MAX, S=INT32_MAX)


def _ends(rows: jax.Array) -> Range:
    """The minimum of the present positions, and their maximum plus one, saturated at int32."""
    least = jnp.min(jnp.where(rows >= 0, rows, INT32_MAX))
    return least, saturating_add(jnp.max(rows), 1)
