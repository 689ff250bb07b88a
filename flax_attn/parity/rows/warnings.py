"""Notes on passing comparisons: only torch rounds somewhere, integers have other widths."""

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from .. import judge
from ..report import Row
from .values import STRUCTURE

# In units of eps: the error of a value that is correct up to its last digit.
LAST = 0.25


def warnings(rows: Sequence[Row]) -> list[str]:
    """One note per dtype in which Flax's error is below `judge.ROUNDS` times torch's.

    Two implementations have similar errors, so torch must round somewhere the float64 truth does
    not: a cast to 16 bits, or a dtype-dependent branch. A few elements may be exact by chance, so
    all gradients together must agree; without gradients, torch's error must exceed the judge's
    floor. And one on integers whose widths differ.
    """
    dtypes = dict.fromkeys(row.dtype for row in rows if row.verdict.other_error is not None)
    widths = [row.verdict.note for row in rows if row.name == STRUCTURE and row.verdict.ok]
    return [*(x for dtype in dtypes for x in _of(rows, dtype)), *filter(None, widths[:1])]


def _of(rows: Sequence[Row], dtype: str) -> Iterator[str]:
    gradients = [row for row in rows if row.dtype == dtype and row.kind == "gradient"]
    digits = LAST if gradients else judge.FLOOR_EPS.get(dtype, 0.0)
    floor = digits * float(ml_dtypes.finfo(dtype).eps)
    outputs = [
        row
        for row in rows
        if row.kind == "output" and row.dtype == dtype and _low(row.verdict.ratio)
        if floor < (row.verdict.other_error or 0.0) < np.inf
    ]
    if not outputs or (gradients and not _low(_together(gradients))):
        return
    least = min(outputs, key=lambda row: row.verdict.ratio or 0.0)
    yield (
        f"somebody rounds in {dtype}: in {least.name} Flax's error is {least.verdict.error:.1e}, "
        f"torch's own {least.verdict.other_error:.1e}; torch rounds where Flax does not, or XLA "
        "left out a cast to fewer bits and back, which jax.lax.reduce_precision keeps"
    )


def _low(ratio: float | None) -> bool:
    return ratio is not None and ratio < judge.ROUNDS


def _together(gradients: Sequence[Row]) -> float | None:
    """Error of all gradients divided by torch's own, each relative to all of them."""
    torch_error = gradients[0].verdict.other_error
    errors = [row.verdict.error for row in gradients]
    if not torch_error or not np.isfinite(errors).all():
        return None
    return float(np.linalg.norm(errors)) / torch_error
