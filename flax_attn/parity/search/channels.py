"""Several numbers fitted to Flax's value at once: a factor or term for each place, or a mix."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .fit import EXACT, STEP, STEPS, of_nodes
from .generic import arounds
from .operation import around, number_text
from .replay import Changes
from .span import Cause, Span

LONGEST = 32  # places along an axis that are fitted
SHOWN = 8  # numbers of them that a sentence lists
DIGITS = 8  # of a number that is no measurement of the data
ENOUGH = 64, 4  # of Flax's values: at least so many, and so many for each number
LEAST = 0.5  # share of the gap that a step of Newton's method takes away, if it leads anywhere
SMALLEST = 1e-6  # relative singular value of what the numbers do
PARTS = ("it", "the one before", "the one after", "the mean along it", "the mean of all")


class Numbers(NamedTuple):
    """A function of an array by several numbers.

    Attributes:
      sentence: of the numbers, in words.
      start: numbers with which it changes nothing.
      function: of the array and of the numbers.
    """

    sentence: Callable[[np.ndarray], str]
    start: np.ndarray
    function: Callable[[Any, np.ndarray], Any]

    def of(self, numbers: np.ndarray) -> Callable[[Any], Any]:
        """The function for these numbers."""
        return lambda x: self.function(x, numbers)


def channels(span: Span) -> Iterator[Cause]:
    """Functions by several numbers, around every operand and result."""
    for what, nodes in span.sites:
        op = span.operation(nodes[0])
        for place, label in arounds(op).items():
            x = op.out if place < 0 else op.args[place]
            for family in _families(x, f"{label}{what}") if x.is_floating_point() else ():
                changes = of_nodes(nodes, lambda n, p=place, f=family: around(f.of(n), p))
                numbers = _solution(span, changes, family.start)
                if numbers is not None:
                    yield Cause(family.sentence(numbers), changes(numbers), fitted=True)


def _families(x: Any, label: str) -> Iterator[Numbers]:
    for axis in (axis for axis in range(x.ndim) if x.shape[axis] > 2):
        yield from _of_axis(x, axis, f"axis {axis} of {label}")


def _of_axis(x: Any, axis: int, where: str) -> Iterator[Numbers]:
    import torch

    size, shape = x.shape[axis], [-1 if i == axis else 1 for i in range(x.ndim)]

    def row(numbers: np.ndarray) -> Any:
        return torch.from_numpy(numbers).reshape(shape)

    if size <= LONGEST:
        words = f"a factor for each place along {where}: "
        factors = np.ones(size)
        yield Numbers(lambda n: words + _listed(n), factors, lambda y, n: y * row(n))
        text = f"a term added to each place along {where}: "
        yield Numbers(lambda n: text + _listed(n), 0 * factors, lambda y, n: y + row(n))

    def mixed(y: Any, n: np.ndarray) -> Any:
        others = y, y.roll(1, axis), y.roll(-1, axis), y.mean(axis, keepdim=True), y.mean()
        return sum(float(share) * other for share, other in zip(n, others, strict=True))

    yield Numbers(lambda n: _shares(n, where), np.eye(len(PARTS))[0], mixed)


def _listed(numbers: np.ndarray) -> str:
    shown = ", ".join(map(number_text, numbers[:SHOWN].tolist()))
    return shown + f" and {numbers.size - SHOWN} more" * (numbers.size > SHOWN)


def _shares(numbers: np.ndarray, where: str) -> str:
    some = zip(numbers.tolist(), PARTS, strict=True)
    return f"a mix along {where}: " + ", ".join(f"{n:g} of {x}" for n, x in some if n)


def _solution(
    span: Span, changes: Callable[[np.ndarray], Changes], numbers: np.ndarray
) -> np.ndarray | None:
    """The numbers by Newton's method, rounded; None if none give Flax's value."""

    def gap(numbers: np.ndarray) -> np.ndarray | None:
        made = span.evaluate(changes(numbers))
        return None if made is None else span.target.whole_gap(made)

    if span.target.got.size < max(ENOUGH[0], ENOUGH[1] * numbers.size):
        return None
    here = gap(numbers)
    for _ in range(STEPS):
        if here is None or not np.linalg.norm(here):
            return None
        ahead = [gap(numbers + STEP * one) for one in np.eye(numbers.size)]
        if any(x is None for x in ahead):
            return None
        slopes = np.stack([(x - here) / STEP for x in ahead if x is not None], -1)
        step, *_ = np.linalg.lstsq(slopes, -here, rcond=SMALLEST)
        next_gap = gap(numbers + step)
        if next_gap is None or np.linalg.norm(next_gap) > LEAST * np.linalg.norm(here):
            return None
        numbers, here = numbers + step, next_gap
        if np.abs(here).max() <= 1e3 * EXACT * span.target.size:
            break
    before_point = math.ceil(math.log10(max(1.0, np.abs(numbers).max())))
    short = np.round(numbers, DIGITS - before_point) + 0.0
    return short if span.explains(changes(short)) else None
