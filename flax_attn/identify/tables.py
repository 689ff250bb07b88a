"""Inputs by position, recognised by their values: the same at another length, or in float64."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from ..positions import LinearScaling
from .name_rotary import name_rotary
from .rotation import Rotation

# Of cos and sin that were computed in float32.
FLOAT32 = 1e-6
RATES = 1e-6  # relative error of the rates that they show


@dataclass(frozen=True)
class Angles:
    """A table of `magnitude f(position rate)`, f one of cos, sin and exp of i times.

    Attributes:
      axis: its axis of positions.
      kind: "cos", "sin" or "exp".
      magnitude: the factor.
      rates: of each entry of the other axes, with 1 entry along the axis.
    """

    axis: int
    kind: str
    magnitude: float
    rates: np.ndarray

    def table(self, length: int) -> np.ndarray:
        """The table at so many positions."""
        shape = [-1 if axis == self.axis else 1 for axis in range(self.rates.ndim)]
        angles = np.arange(length).reshape(shape) * self.rates
        functions = {"cos": np.cos, "sin": np.sin, "exp": lambda x: np.exp(1j * x)}
        return self.magnitude * functions[self.kind](angles)

    def in_float64(self, numbers: Collection[float]) -> "Angles":
        """The table of the `Rotary` whose cos and sin in float32 are these."""
        wide = np.unique(self.rates)[::-1]
        if not (wide > 0).all():
            return self
        width, precision = 2 * len(wide), RATES * float(wide[-1])
        rotation = Rotation(1.0, self.magnitude, width, "half", wide, False, precision)
        named = name_rotary(rotation, width, numbers, RATES)[0]
        scaling = named.scaling or LinearScaling(1.0)
        exact = np.asarray(scaling.rates(named.base, width))
        nearest = np.abs(np.log(self.rates[..., None] / exact)).argmin(-1)
        return Angles(self.axis, self.kind, scaling.magnitude, exact[nearest])


def angles_in(arrays: Sequence[np.ndarray], length: int) -> dict[int, Angles]:
    """Recognises tables of angles of `length` positions, by the index of their array.

    The sine shows slow rates better than the cosine, so that both together are read.
    """
    made: dict[int, Angles] = {}
    for i, array in enumerate(arrays):
        if array.dtype.kind == "c":
            made |= dict(zip([i], _tables([array], ["exp"], length), strict=False))
    for i, j in permutations(range(len(arrays)), 2):
        pair = [arrays[i], arrays[j]]
        if pair[0].shape == pair[1].shape and all(x.dtype.kind == "f" for x in pair):
            cos_and_sin = _tables(pair, ["cos", "sin"], length)
            made |= dict(zip((i, j), cos_and_sin, strict=False))
    return made


def _tables(arrays: Sequence[np.ndarray], kinds: Sequence[str], length: int) -> list[Angles]:
    """The tables of these kinds, if that is what the arrays are; else none."""
    axes = [axis for axis, size in enumerate(arrays[0].shape) if size == length >= 3]
    for axis in axes:
        first, second = (np.stack([np.take(x, t, axis) for x in arrays]) for t in (0, 1))
        size = float(np.abs(first[0]).max())
        if kinds == ["exp"]:
            rates = np.angle(second[0] * first[0].conj())
        else:
            rates = np.arctan2(second[1], second[0])
        made = [Angles(axis, kind, size, np.expand_dims(rates, axis)) for kind in kinds]
        pairs = zip(made, arrays, strict=True)
        if size and all(np.abs(x.table(length) - y).max() <= FLOAT32 * size for x, y in pairs):
            return made
    return []


def resized(array: np.ndarray, before: int, after: int) -> np.ndarray:
    """An input at another length: even steps go on, and the rest repeats its last entry."""
    axes = [i for i, size in enumerate(array.shape) if size == before]
    if len(axes) == 1 and array.dtype.kind in "iuf" and before > 2:
        moved = np.moveaxis(array, axes[0], -1)
        steps = moved[..., 1:] - moved[..., :-1]
        if (np.abs(steps - steps[..., :1]) <= FLOAT32 * np.abs(steps)).all() and steps.any():
            longer = moved[..., :1] + steps[..., :1] * np.arange(after, dtype=array.dtype)
            return np.moveaxis(longer, -1, axes[0])
    if len(axes) == 2 and axes[1] == axes[0] + 1 and axes[1] == array.ndim - 1:
        causal = _causal(array, after)
        if causal is not None:
            return causal
    return _repeated(array, axes, after)


def _causal(array: np.ndarray, after: int) -> np.ndarray | None:
    """A causal mask of two values; None if it is another one."""
    visible, hidden = array[..., :1, :1], array[..., :1, -1:]
    length = array.shape[-1]
    wanted = np.where(np.tri(length, dtype=bool), visible, hidden)
    if not np.array_equal(wanted, array):
        return None
    return np.where(np.tri(after, dtype=bool), visible, hidden)


def _repeated(array: np.ndarray, axes: list[int], after: int) -> np.ndarray:
    for axis in axes:
        index: Any = np.minimum(np.arange(after), array.shape[axis] - 1)
        array = np.take(array, index, axis)
    return array
