"""Arrays by position, known by their values: angles of a rotary, biases by distance, masks."""

from typing import Any

import jax
import numpy as np

from .._internal.types import Sizes
from ..masks import CAUSAL, Mask

HIDDEN = -1e3  # an additive mask is below it where a key is hidden
RATES = 1e-6  # largest relative error of rates that torch computed in float32
FLOAT32 = 1e-5  # largest error of tables that torch computed in float32


def is_additive(array: np.ndarray) -> bool:
    """Whether it can only hide: zero, or far below."""
    return bool(((array == 0) | (array < HIDDEN)).all())


def is_mask(array: np.ndarray) -> bool:
    """Whether it has two values, of which one may hide."""
    return is_additive(array) or bool(((array == 0) | (array == 1)).all())


def are_angles(cos: np.ndarray, sin: np.ndarray) -> bool:
    """Whether two arrays are one factor times cosines and sines, from the angle zero."""
    if cos.shape != sin.shape or not cos.dtype.kind == sin.dtype.kind == "f":
        return False
    power = cos**2 + sin**2
    is_circle = np.ptp(power) <= FLOAT32 * power.max()
    return bool(is_circle and sin.any() and cos.all() and sin.flat[0] == 0)


def angles(rotary: Any, width: int, length: int) -> list[np.ndarray] | None:
    """Cosines and sines of a rotary in float64, `T width/2`; None if it needs positions."""
    parts = np.arange(width)
    first = parts < width // 2 if rotary.layout == "half" else parts % 2 == 0
    with jax.enable_x64(True):
        try:
            y = np.asarray(rotary(np.broadcast_to(first * 1.0, (length, 1, width)))[:, 0])
        except ValueError:  # an axial one, or a table of fewer columns
            return None
    return [y[:, first], -y[:, ~first] if rotary.reverse else y[:, ~first]]


def columns_of(rotary: Any, rows: list[np.ndarray]) -> tuple[int, np.ndarray] | None:
    """The width at which each column of two tables `T W` is one of the rotary's; and which one."""
    count = rows[0].shape[-1]
    for width in [rotary.width] if rotary.width else [count, 2 * count]:
        exact = angles(rotary, width, len(rows[0]))
        if exact is not None:
            # Angles of the second token tell them apart: their sines have all their digits.
            column_angles, exact_angles = (np.arctan2(sin[1], cos[1]) for cos, sin in (rows, exact))
            column = np.abs(column_angles[:, None] - exact_angles).argmin(-1)
            angle = exact_angles[column]
            is_same = (np.abs(column_angles - angle) <= FLOAT32 * np.abs(angle)).all()
            errors = (np.abs(x[:, column] - y).max() for x, y in zip(exact, rows, strict=True))
            if is_same and max(errors) <= FLOAT32:
                return width, column
    return None


def exact_rates(rotary: Any, rates: Any) -> Any:
    """The rates of a rotary as a tensor of float64, if `rates` are theirs in float32; or None."""
    import torch

    if rates.ndim != 1 or not rates.is_floating_point() or not len(rates):
        return None
    tables = angles(rotary, 2 * len(rates), 2)
    if tables is None:
        return None
    exact = np.arctan2(tables[1][1], tables[0][1])
    errors = np.abs(rates.detach().double().cpu().numpy() - exact)
    return torch.from_numpy(exact) if (errors <= RATES * exact).all() else None


def even_steps(array: np.ndarray, axis: int) -> np.ndarray | None:
    """The step of an array that grows evenly along an axis, which has size 1 in it; or None."""
    if array.dtype.kind not in "iuf" or array.shape[axis] < 3:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a mask holds the least number, or -inf
        steps = np.diff(array.astype(np.float64) if array.dtype.kind == "f" else array, axis=axis)
        first = steps.take([0], axis)
        is_even = (np.abs(steps - first) <= FLOAT32 * np.abs(first)).all() and steps.any()
    return first if is_even else None


def evenly(array: np.ndarray, axis: int, length: int) -> np.ndarray:
    """An array whose steps along an axis are even, in full precision and at another length."""
    step = even_steps(array, axis)
    if step is None:
        return array
    counts = np.arange(length).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return array.take([0], axis) + step * counts


def resized(array: np.ndarray, before: int, after: int, mask: Any) -> np.ndarray:
    """An input at another length: a layer's mask, even steps, or its last entry repeated."""
    axes = [i for i, size in enumerate(array.shape) if size == before]
    if before == after or not axes:
        return array
    if len(axes) > 1 and axes[-2:] == [array.ndim - 2, array.ndim - 1]:
        visible, hidden = array[..., :1, :1], array[..., :1, -1:]
        for each in (mask, CAUSAL):
            old, new = (_static(each, n) for n in (before, after))
            if old is None or new is None:
                continue
            if np.array_equal(np.where(old, visible, hidden), array):
                return np.where(new, visible, hidden)
    if len(axes) == 1 and even_steps(array, axes[0]) is not None:
        return evenly(array, axes[0], after)
    for axis in axes:
        array = np.take(array, np.minimum(np.arange(after), before - 1), axis)
    return array


def _static(mask: Any, length: int) -> np.ndarray | None:
    """Which of so many keys each of as many queries sees, if nothing else decides it."""
    return mask.static(Sizes((), 1, length, length)) if isinstance(mask, Mask) else None
