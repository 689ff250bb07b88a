"""Which value of Flax belongs to which of torch, and how torch's is laid out in Flax's shape."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from .. import judge

# The points inside attention that torch computes with heads before positions, Flax after.
TURNED = ("query", "key", "value", "context")
# Torch's fused functions put the scale, or its root, on queries and keys before their product.
SCALED = ("query", "key")

# The softmax of a score this far below its row's largest is zero in float64.
UNSEEN = np.log(np.finfo(np.float64).smallest_subnormal) - 1


class Layout(NamedTuple):
    """How torch's array lies in Flax's shape: its values, and gradients that arrive at them."""

    value: Callable[[np.ndarray], np.ndarray]
    gradient: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def plain(cls, how: Callable[[np.ndarray], np.ndarray]) -> "Layout":
        """One that loses and repeats nothing."""
        return cls(how, how)


class Match(NamedTuple):
    """Torch's value beside Flax's: in which layout, times what, and the value itself so."""

    layout: Layout
    factor: float
    value: np.ndarray

    def gradient(self, found: np.ndarray) -> np.ndarray:
        """Torch's gradient at its value, as it arrives at Flax's."""
        return self.layout.gradient(found) / self.factor


def point_of(tap: str) -> str:
    """The last piece of a tap's name, without its count: `"scores"` of `"attn.scores#2"`."""
    return tap.rpartition(".")[2].partition("#")[0]


def layouts(tap: str, shape: tuple[int, ...], want: tuple[int, ...]) -> Iterator[Layout]:
    """The ways in which an array of torch's shape may lie in Flax's, the plainest first."""
    if shape == want:
        yield Layout.plain(lambda x: x)
    size, whole = int(np.prod(shape)), int(np.prod(want))
    if shape != want and size == whole and shape[-2:] == want[-2:]:
        yield Layout.plain(lambda x: x.reshape(shape))
    if point_of(tap) in TURNED and len(shape) >= 3:
        yield from _turned(shape, want)
    elif len(shape) == len(want) >= 3 and shape == (want[0], *want[2:], want[1]):
        yield Layout.plain(lambda x: np.moveaxis(x, 1, -1))  # channels last


def _turned(shape: tuple[int, ...], want: tuple[int, ...]) -> Iterator[Layout]:
    """From torch's `(B N) T H` to `*B T N H`; keys repeated for their queries once each."""
    *batch, length, heads, width = shape
    rows = int(np.prod(batch)) * length * width
    if not rows or want[-2:] != (length, width) or int(np.prod(want)) % rows:
        return
    all_heads = int(np.prod(want)) // rows
    if all_heads % heads == 0:
        group = all_heads // heads

        def split(x: np.ndarray) -> np.ndarray:
            return x.reshape(*batch, heads, group, length, width)

        yield Layout(
            lambda x: np.swapaxes(split(x)[..., 0, :, :], -3, -2),
            lambda x: np.swapaxes(split(x).sum(axis=-3), -3, -2),
        )


def factors(tap: str, width: int) -> tuple[float, ...]:
    """What torch's value may be multiplied with: the place of the scale is each side's own."""
    return (1.0, width**0.5, width**0.25) if point_of(tap) in SCALED else (1.0,)


def hidden(scores: np.ndarray) -> np.ndarray:
    """Scores, -inf wherever a softmax in float64 gives zero: -1e9 hides as well as -inf."""
    if not scores.size:
        return scores
    most = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(scores - most < UNSEEN, -np.inf, scores)


def paired(tap: str, got: np.ndarray, want: np.ndarray) -> Match | None:
    """Torch's value in the layout that brings it nearest to Flax's.

    None if the shapes have nothing to do with each other.
    """
    if point_of(tap) == "scores":
        got, want = hidden(got), hidden(want)
    best: tuple[float, Match] | None = None
    for layout in layouts(tap, got.shape, want.shape):
        for factor in factors(tap, want.shape[-1] if want.ndim else 1):
            laid = layout.value(want)
            match = Match(layout, factor, laid if factor == 1.0 else laid * factor)
            error = judge.error(got, match.value)
            if error <= judge.SAME_FUNCTION:
                return match
            if best is None or error < best[0]:
                best = error, match
    return best[1] if best else None
