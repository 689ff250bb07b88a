"""The simplest mask whose tables are those measured, and the Python that builds it.

The numbers of each kind of mask are read from the tables, where a hidden pair shows them; each
candidate must then equal every table.
"""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import numpy as np

from .._internal.types import Sizes
from ..masks import CAUSAL, FULL, Causal, Chunked, Mask, Prefix, Window

Candidate = tuple[int, Mask]
OPERATORS = {"And": " & ", "Or": " | "}


@dataclass(frozen=True)
class Entries:
    """All pairs of a query and a key in the tables, as vectors of equal length.

    Attributes:
      offset: of the masks whose numbers are read, 0 or "end".
      query, key: their numbers.
      back: how far the key is before the query, on the diagonal that `offset` sets.
      hidden: whether the query cannot attend to the key.
    """

    offset: Any
    query: np.ndarray
    key: np.ndarray
    back: np.ndarray
    hidden: np.ndarray

    @property
    def causal(self) -> Mask:
        """The causal mask on this diagonal."""
        return Causal(self.offset)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Visible keys before and after the query's own; None for a side that hides nothing."""
        return self._side(self.back), self._side(-self.back)

    def _side(self, distance: np.ndarray) -> int | None:
        most = int(distance[~self.hidden].max())
        return None if most == distance.max() else most


def fit_mask(tables: Sequence[np.ndarray]) -> Mask | None:
    """The mask with the fewest numbers that equals every table, or None if there is none.

    A number is only returned if a table shows it: a window as long as the longest table is no
    window. If masks with as many numbers equal the tables but differ at longer lengths, the tables
    cannot tell which it is, and the result is None. Where masks are equal everywhere,
    `CAUSAL & Window(n, 0)` is preferred to `Window(n, 0)`.

    Args:
      tables: booleans, `T T` or `T S`, at two or more lengths; True if query t may attend to key s.

    Raises:
      ValueError: without tables, or for one that has not two axes.
    """
    tables = [np.asarray(table, bool) for table in tables]
    if not tables or any(table.ndim != 2 for table in tables):
        raise ValueError(
            f"fit_mask takes tables of two axes, T S; got {[x.shape for x in tables]}."
        )
    if not any(table.any() for table in tables):
        return None
    candidates = list(_possible_masks(tables))
    for count in sorted({numbers for numbers, _ in candidates}):
        equal = [m for numbers, m in candidates if numbers == count and _equals(m, tables)]
        if equal:
            return equal[0] if _agree(equal, tables) else None
    return None


def mask_text(mask: Mask) -> str:
    """Python that builds a static mask from the public names, as "CAUSAL & Window(4, 0)".

    Raises:
      ValueError: for a mask that holds arrays or functions.
    """
    if not mask.is_static:
        raise ValueError(f"Only a mask without arrays and functions has a text; got {mask}.")
    name = type(mask).__name__
    if mask in (FULL, CAUSAL):
        return name.upper()
    values = [(field, getattr(mask, field.name)) for field in fields(mask)]  # pyright: ignore[reportArgumentType]
    if name in OPERATORS:
        return OPERATORS[name].join(_operand(value, name, i) for i, (_, value) in enumerate(values))
    if name == "Not":
        return f"~{_operand(values[0][1], name, 0)}"
    arguments = [
        _literal(value) if field.default is MISSING else f"{field.name}={_literal(value)}"
        for field, value in values
        if field.default is MISSING or value != field.default
    ]
    return f"{name}({', '.join(arguments)})"


def _operand(mask: Mask, operator: str, place: int) -> str:
    """In parentheses if another operator made it, or if it stands on the right."""
    name, text = type(mask).__name__, mask_text(mask)
    is_plain = name not in OPERATORS or (name == operator and place == 0)
    return text if is_plain else f"({text})"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _equals(mask: Mask, tables: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(_static(mask, *table.shape), table) for table in tables)


def _static(mask: Mask, queries: int, keys: int) -> np.ndarray:
    grid = mask.static(Sizes((), 1, queries, keys))
    assert grid is not None, mask
    return grid


def _agree(masks: Sequence[Mask], tables: Sequence[np.ndarray]) -> bool:
    """Whether the masks are equal at longer lengths too, with as many more keys as queries."""
    longest = max(max(table.shape) for table in tables)
    shapes = {(table.shape[0] + longest, table.shape[1] + longest) for table in tables}
    return all(
        np.array_equal(_static(masks[0], *shape), _static(mask, *shape))
        for shape in shapes
        for mask in masks[1:]
    )


def _possible_masks(tables: Sequence[np.ndarray]) -> Iterator[Candidate]:
    """Masks that may equal the tables, each with how many numbers it has."""
    yield 0, FULL
    yield 1, ~Window(0, 0)
    square = all(table.shape[0] == table.shape[1] for table in tables)
    for offset in (0,) if square else (0, "end"):
        entries = _entries(tables, offset)
        yield 0, entries.causal
        yield from _windows(entries)
        yield from _with_prefix(entries)
    yield from _chunks(_entries(tables, 0))


def _entries(tables: Sequence[np.ndarray], offset: Any) -> Entries:
    parts = []
    for table in tables:
        q, k = np.indices(table.shape)
        moved = table.shape[1] - table.shape[0] if offset == "end" else 0
        parts.append(np.stack([x.ravel() for x in (q, k, q + moved - k, ~table)]))
    query, key, back, hidden = np.concatenate(parts, axis=1)
    return Entries(offset, query, key, back, hidden.astype(bool))


def _windows(entries: Entries) -> Iterator[Candidate]:
    """Masks by the distance of query and key alone."""
    left, right = entries.sides
    if left is not None and left < 0:
        return
    if right is not None and right < 0:
        if entries.offset == 0:
            yield (1, Causal(right)) if left is None else (2, Causal(right) & Window(left, 0))
        return
    if left is not None and right == 0:
        yield 1, entries.causal & Window(left, 0, entries.offset)
    if (left, right) != (None, None):
        numbers = 1 if right == 0 else (left is not None) + (right is not None)
        yield numbers, Window(left, right, entries.offset)


def _with_prefix(entries: Entries) -> Iterator[Candidate]:
    """Masks with the first keys visible to all queries, or to all later ones."""
    before = entries.hidden & (entries.back >= 0)
    after = entries.hidden & (entries.back < 0)
    if not entries.hidden.any():
        return
    first = int(entries.key[entries.hidden].min())
    yield 1, Prefix(first)
    yield 1, entries.causal | Prefix(first)
    left = right = None
    if before.any():
        # Later keys are hidden from early queries also within a prefix, by a causal mask.
        first = int(entries.key[before].min())
        left = int(entries.back[before].min()) - 1
        yield 1, entries.causal & Prefix(first)
        if left >= 0:
            window = Window(left, 0, entries.offset)
            yield 2, entries.causal & (window | Prefix(first))
    if after.any():
        right = int(-entries.back[after].max()) - 1
    if left is None or left >= 0:
        numbers = 1 + len({left, right} - {None})
        yield numbers, Window(left, right, entries.offset) | Prefix(first)


def _chunks(entries: Entries) -> Iterator[Candidate]:
    """Masks by chunks of positions, whose size is where the first chunk ends."""
    ends = (
        entries.key[entries.hidden & (entries.query == 0)],
        entries.query[entries.hidden & (entries.key == 0)],
    )
    for size in {int(end.min()) for end in ends if end.size} - {0}:
        yield 1, CAUSAL & Chunked(size)
        yield 1, Chunked(size)
        yield 1, CAUSAL | Chunked(size)
