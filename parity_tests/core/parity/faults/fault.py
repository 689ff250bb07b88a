"""A planted fault: where it lies, at full size and at low amplitude, and what to say of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .setup import LOW, Setup, mixed
from .trial_flax import RIGHT

A = "layers.0.attn."
GROUPS = (
    "converter",
    "scale",
    "score",
    "mask",
    "softmax and dropout",
    "heads",
    "rotary and norm",
    "gradient",
    "cache",
    "process",
)
Plant = Callable[[bool], Setup]


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
      name: what is wrong, in words.
      group: one of `GROUPS`.
      plant: the trial with the fault in it; with True at low amplitude.
      tap: what `report.first.tap` must be; "" if the fault lies outside every tap.
      hint: words that `report.first.hint` must hold, with "|" between those that are as true;
        "" if none is expected.
    """

    name: str
    group: str
    plant: Plant
    tap: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    def setup(self, low: bool) -> Setup:
        """The trial; with gradients where they are at fault, with one layer at low amplitude."""
        setup = self.plant(low)
        options = {"grads": self.group == "gradient", **setup.options}
        setup = replace(setup, options=options)
        return setup.shallow() if low else setup


def part(name: str, wrong: Callable, at: str = "", low: Callable = mixed, **setup: Any) -> Plant:
    """`wrong` in place of a part of every module at or below `at`."""

    def plant(is_low: bool) -> Setup:
        right = getattr(RIGHT, name)
        return Setup(parts=((at, name, low(right, wrong) if is_low else wrong),), **setup)

    return plant


def edited(
    edit: Callable, low: Callable | None = None, pair: Any = "apart", deep: bool = False
) -> Plant:
    """Weights changed after a right port: `edit(weights, sizes)` returns those that change."""

    def slightly(right: dict, z: Any) -> dict:
        return {
            path: right[path] + LOW * (wrong - right[path])
            for path, wrong in edit(right, z).items()
        }

    return lambda is_low: Setup(pair, edit=(low or slightly) if is_low else edit, deep=deep)


def column(edit: Callable) -> Callable:
    """The low form of an edit: its last column alone."""

    def last(right: dict, z: Any) -> dict:
        found = {path: np.array(right[path]) for path in edit(right, z)}
        for path, wrong in edit(right, z).items():
            found[path][..., -1] = wrong[..., -1]
        return found

    return last
