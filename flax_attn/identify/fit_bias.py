"""What is added to the logits, named: slopes, T5's buckets, or a table by positions.

A softmax is the same whatever is added to a whole row of logits, so two biases are equal if they
differ by a constant for each head and query.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from ..positions.alibi import alibi_slopes
from ..positions.relative import t5_buckets
from ..scores import Additive, Alibi, Score, T5Bias

# Of the largest value, or of 1 if that is larger: logits of this size were subtracted to measure a
# bias in float64. Their rounding is far below it, and parameters of a model differ by far more.
TOLERANCE = 1e-9
# Tried first and in this order, since short tables cannot tell one from the next: T5's own, then
# those of other published models and round numbers.
USUAL_MAX_DISTANCES = (128, 8, 10, 16, 20, 32, 50, 64, 100, 256, 500, 512, 800, 1000, 1024)
LARGEST_MAX_DISTANCE = 2**16

Kind = Literal["none", "alibi", "t5", "positions"]


@dataclass(frozen=True)
class Bias:
    """What is added to the logits.

    Attributes:
      kind: "none" for nothing, "alibi" for slopes times distances, "t5" for a parameter whose rows
        are T5's buckets in T5's order, "positions" for any other table.
      score: what adds it in this library; None for "none".
      parameter: the name of the parameter that holds the table, or None if none does.
      transposed: whether that parameter has the heads first, `N rows`.
      rows: for "positions" of a parameter, its row for each row of the score's table: the table is
        `parameter[rows]`, after transposing. Rows that no distance uses repeat another.
    """

    kind: Kind
    score: Score | None
    parameter: str | None = None
    transposed: bool = False
    rows: tuple[int, ...] | None = None


class Measured(NamedTuple):
    """Biases `N T S` with 0 where hidden, what is visible, `N T S`, and the size of an error."""

    biases: list[np.ndarray]
    visible: list[np.ndarray]
    error: float

    @property
    def heads(self) -> int:
        return len(self.biases[0])

    def equals(self, others: Sequence[np.ndarray]) -> bool:
        """Whether these biases, which broadcast to the measured ones, differ by row constants."""
        for bias, other, visible in zip(self.biases, others, self.visible, strict=True):
            difference = bias - other
            most = np.where(visible, difference, -np.inf).max(-1)
            least = np.where(visible, difference, np.inf).min(-1)
            if ((most - least) > self.error).any():
                return False
        return True

    def distances(self, offset: Any) -> list[np.ndarray]:
        """Key minus query, `T S`, for each table."""
        grids = []
        for _, T, S in (bias.shape for bias in self.biases):
            moved = S - T if offset == "end" else 0
            grids.append(np.arange(S) - np.arange(T)[:, None] - moved)
        return grids


class ByDistance(NamedTuple):
    """A bias that depends on the distance alone, up to a constant for each head.

    Attributes:
      offset: of the scores that add it, 0 or "end".
      grids: key minus query of each table, `T S`.
      distances: those that are visible, increasing, `D`.
      values: of each distance, `D N`.
    """

    offset: Any
    grids: list[np.ndarray]
    distances: np.ndarray
    values: np.ndarray


def fit_bias(
    tables: Sequence[np.ndarray],
    visible: Sequence[np.ndarray],
    parameters: Mapping[str, np.ndarray],
) -> Bias | None:
    """What adds these biases at every length, or None if no score does.

    Slopes that equal `alibi_slopes(N)` are exactly those. Tables by distance must be a parameter of
    the module; a constant by query and key is named only if all tables have one shape. A parameter
    that is still 0 cannot be told from no bias: draw it first.

    Args:
      tables: biases, `N T S` in float64, one for each length; any value where nothing is visible.
      visible: booleans that broadcast to them, True where query t may attend to key s.
      parameters: the module's arrays by name, among which a table is looked for.

    Raises:
      ValueError: without tables, or for one that has not three axes; if a table is not finite where
        it is visible.
    """
    measured = _measured_biases(tables, visible)
    if measured.equals([np.zeros((1, 1, 1)) for _ in tables]):
        return Bias("none", None)
    shapes = {bias.shape for bias in measured.biases}
    square = all(T == S for _, T, S in shapes)
    by_distance = [_by_distance(measured, offset) for offset in ((0,) if square else (0, "end"))]
    for fit in (_fit_slopes, _fit_buckets, _fit_clipped):
        for known in by_distance:
            bias = None if known is None else fit(measured, known, parameters)
            if bias is not None:
                return bias
    return _fit_constant(measured, parameters) if len(shapes) == 1 else None


def _measured_biases(tables: Sequence[np.ndarray], visible: Sequence[np.ndarray]) -> Measured:
    biases = [np.asarray(table, np.float64) for table in tables]
    if not biases or len(biases) != len(visible) or any(x.ndim != 3 for x in biases):
        raise ValueError(
            "fit_bias takes tables of three axes, N T S, and as many tables of what is visible; "
            f"got {[x.shape for x in biases]} and {[np.shape(x) for x in visible]}."
        )
    shown = [np.broadcast_to(v, x.shape) for v, x in zip(visible, biases, strict=True)]
    biases = [np.where(v, x, 0.0) for v, x in zip(shown, biases, strict=True)]
    if not all(np.isfinite(x).all() for x in biases):
        raise ValueError("A bias must be finite where it is visible.")
    largest = max(1.0, *(abs(x).max() for x in biases))
    return Measured(biases, shown, TOLERANCE * largest)


def _by_distance(measured: Measured, offset: Any) -> ByDistance | None:
    """The bias of each distance, or None if it depends on more than that.

    Rows differ from each other by constants, which the distances they share show.
    """
    grids = measured.distances(offset)
    rows = [
        (grid[t, shown[:, t].all(0)], bias[:, t, shown[:, t].all(0)].T)
        for grid, bias, shown in zip(grids, measured.biases, measured.visible, strict=True)
        for t in range(len(grid))
    ]
    # A single visible key says nothing, since any constant may be added to it.
    pending = sorted((row for row in rows if len(row[0]) > 1), key=lambda row: -len(row[0]))
    if not pending:
        return None
    values: dict[int, np.ndarray] = dict(zip(pending[0][0].tolist(), pending[0][1], strict=True))
    while pending:
        joins = (i for i, row in enumerate(pending) if not values.keys().isdisjoint(row[0]))
        place = next(joins, None)
        if place is None:
            return None
        at, bias = pending.pop(place)
        shared = [i for i, d in enumerate(at.tolist()) if d in values]
        gaps = bias[shared] - np.stack([values[int(at[i])] for i in shared])
        if (np.ptp(gaps, axis=0) > measured.error).any():
            return None
        for d, value in zip(at.tolist(), bias - gaps.mean(0), strict=True):
            values.setdefault(d, value)
    distances = np.array(sorted(values))
    return ByDistance(offset, grids, distances, np.stack([values[d] for d in distances.tolist()]))


def _fit_slopes(
    measured: Measured, known: ByDistance, parameters: Mapping[str, np.ndarray]
) -> Bias | None:
    """ALiBi: one slope for each head."""
    lengths = abs(known.distances) - abs(known.distances).mean()
    if not lengths.any():
        return None
    slopes = -(lengths @ known.values) / (lengths @ lengths)
    usual = alibi_slopes(measured.heads)
    if (abs(slopes - usual) <= TOLERANCE).all():
        slopes = usual
    biases = [-slopes[:, None, None] * abs(grid) for grid in known.grids]
    if not measured.equals(biases):
        return None
    return Bias("alibi", Alibi(slopes, known.offset))


def _fit_buckets(
    measured: Measured, known: ByDistance, parameters: Mapping[str, np.ndarray]
) -> Bias | None:
    """T5's buckets: a parameter with a row for each."""
    for name, transposed, table in _tables_of(parameters, measured.heads):
        for rows in _matching_rows(known.values, table, measured.error):
            settings = _bucket_settings(known.distances, rows, len(table))
            if settings is None:
                continue
            indices = [t5_buckets(grid, **settings) for grid in known.grids]
            if measured.equals([np.moveaxis(table[i], -1, 0) for i in indices]):
                return Bias("t5", T5Bias(table, **settings, offset=known.offset), name, transposed)
    return None


def _fit_clipped(
    measured: Measured, known: ByDistance, parameters: Mapping[str, np.ndarray]
) -> Bias | None:
    """Clipped relative positions: a parameter with a row for each distance, the last ones clipped.

    T5's buckets say it, if all distances up to the longest have rows of their own.
    """
    for name, transposed, table in _tables_of(parameters, measured.heads):
        for matched in _matching_rows(known.values, table, measured.error):
            line = _line(known.distances, matched, len(table))
            if line is None:
                continue
            sign, center = line
            longest = max(center, len(table) - 1 - center, 2)
            settings = {"buckets": 4 * longest, "max_distance": longest + 1, "bidirectional": True}
            around = np.arange(-longest - 1, longest + 2)
            rows = np.zeros(4 * longest, int)
            rows[t5_buckets(around, **settings)] = np.clip(
                sign * around + center, 0, len(table) - 1
            )
            indices = [rows[t5_buckets(grid, **settings)] for grid in known.grids]
            if measured.equals([np.moveaxis(table[i], -1, 0) for i in indices]):
                score = T5Bias(table[rows], **settings, offset=known.offset)
                return Bias("positions", score, name, transposed, tuple(rows.tolist()))
    return None


def _fit_constant(measured: Measured, parameters: Mapping[str, np.ndarray]) -> Bias | None:
    """A table by query and key, of the only size there is."""
    table = measured.biases[0]
    for name, array in parameters.items():
        if array.size == table.size and array.shape[-3:] == table.shape:
            whole = np.asarray(array, np.float64).reshape(table.shape)
            if measured.equals([whole] * len(measured.biases)):
                return Bias("positions", Additive(whole), name)
    if not measured.equals([table] * len(measured.biases)):
        return None
    return Bias("positions", Additive(table))


def _tables_of(
    parameters: Mapping[str, np.ndarray], heads: int
) -> Iterator[tuple[str, bool, np.ndarray]]:
    """Parameters that may be tables `rows N`: name, whether transposed, and the table."""
    for transposed, (name, array) in product((False, True), parameters.items()):
        if array.ndim == 2 and array.shape[0 if transposed else 1] == heads:
            table = np.asarray(array, np.float64)
            yield name, transposed, table.T if transposed else table


def _matching_rows(values: np.ndarray, table: np.ndarray, error: float) -> Iterator[np.ndarray]:
    """Rows of the table that equal the values, `D N`, up to one constant for each head."""
    steps = values - values[0]
    # Most rows are no start: their largest step leads to no row, in the head that has it.
    other, head = np.unravel_index(abs(steps).argmax(), steps.shape)
    ordered = np.sort(table[:, head])
    goals = table[:, head] + steps[other, head]
    after = ordered.searchsorted(goals - error).clip(max=len(table) - 1)
    for first in table[abs(ordered[after] - goals) <= error]:
        gaps = abs((first + steps)[:, None] - table).max(-1)
        if (gaps.min(1) <= error).all():
            yield gaps.argmin(1)


def _bucket_settings(
    distances: np.ndarray, rows: np.ndarray, buckets: int
) -> dict[str, Any] | None:
    """The arguments of `t5_buckets` that give these rows, or None."""
    # Where no later key is visible, both kinds may fit, and one direction is what it is for.
    for bidirectional in (True, False) if (distances > 0).any() else (False, True):
        single = (buckets // 2 if bidirectional else buckets) // 2
        if buckets < (4 if bidirectional else 2):
            continue
        settings = {"buckets": buckets, "bidirectional": bidirectional}

        def buckets_for(max_distance: int, settings: Any = settings) -> np.ndarray:
            return np.asarray(t5_buckets(distances, max_distance=max_distance, **settings))

        # A larger max_distance never gives a distance a later bucket.
        every = range(single + 1, LARGEST_MAX_DISTANCE)
        least = bisect_left(every, True, key=lambda m: bool((buckets_for(m) <= rows).all()))
        for max_distance in (*USUAL_MAX_DISTANCES, *every[least : least + 1]):
            if max_distance > single and (buckets_for(max_distance) == rows).all():
                return {**settings, "max_distance": max_distance}
    return None


def _line(distances: np.ndarray, rows: np.ndarray, length: int) -> tuple[int, int] | None:
    """Sign and center if the rows are `sign * distance + center`, clipped to the table."""
    for sign in (1, -1):
        inside = (rows > 0) & (rows < length - 1)
        for center in {*(rows - sign * distances)[inside].tolist(), 0, length - 1}:
            if (np.clip(sign * distances + center, 0, length - 1) == rows).all():
                return sign, center
    return None
