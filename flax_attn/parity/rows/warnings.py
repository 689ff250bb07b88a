"""Warnings: comparisons that passed, and yet say that one side rounds where the other does not."""

from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np

from .. import judge
from ..report import Row

# Of eps: an error of a number that is right but for its last digit.
LAST = 0.25


def warnings(rows: Sequence[Row]) -> list[str]:
    """One sentence for each dtype in which Flax errs less than `judge.ROUNDS` times as much.

    Two ways to compute the same err about alike, so torch's must come from a rounding of its own
    that the float64 truth has not: a cast to 16 bits, or a branch that asks for the dtype. Of few
    elements all may come out right by chance. So all gradients together must say the same; where
    there are none, torch's error must be more than the last digits, the judge's floor.
    """
    dtypes = dict.fromkeys(row.dtype for row in rows if row.verdict.other_error is not None)
    return [sentence for dtype in dtypes for sentence in _of(rows, dtype)]


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
    """The error of all gradients over torch's own, where each is measured against all."""
    torch_error = gradients[0].verdict.other_error
    errors = [row.verdict.error for row in gradients]
    if not torch_error or not np.isfinite(errors).all():
        return None
    return float(np.linalg.norm(errors)) / torch_error
