"""Which value of Flax belongs to which of torch, and how torch's is laid out in Flax's shape."""

from collections.abc import Callable, Iterator

import numpy as np

from . import judge

# The points inside attention that torch computes with heads before positions, Flax after.
TURNED = ("query", "key", "value", "context")
# Torch's fused functions put the scale, or its root, on queries and keys before their product.
SCALED = ("query", "key")

# The softmax of a score this far below its row's largest is zero in float64.
UNSEEN = np.log(np.finfo(np.float64).smallest_subnormal) - 1

Layout = Callable[[np.ndarray], np.ndarray]


def point_of(tap: str) -> str:
    """The last piece of a tap's name, without its count: `"scores"` of `"attn.scores#2"`."""
    return tap.rpartition(".")[2].partition("#")[0]


def layouts(tap: str, shape: tuple[int, ...], want: tuple[int, ...]) -> Iterator[Layout]:
    """The ways in which an array of torch's shape may lie in Flax's, the plainest first."""
    if shape == want:
        yield lambda x: x
    size, whole = int(np.prod(shape)), int(np.prod(want))
    if shape != want and size == whole and shape[-2:] == want[-2:]:
        yield lambda x: x.reshape(shape)
    if point_of(tap) in TURNED and len(shape) >= 3:
        yield from _turned(shape, want)
    elif len(shape) == len(want) >= 3 and shape == (want[0], *want[2:], want[1]):
        yield lambda x: np.moveaxis(x, 1, -1)  # channels last


def _turned(shape: tuple[int, ...], want: tuple[int, ...]) -> Iterator[Layout]:
    """From torch's `(B N) T H` to `*B T N H`; keys repeated for their queries once each."""
    *batch, length, heads, width = shape
    rows = int(np.prod(batch)) * length * width
    if not rows or want[-2:] != (length, width) or int(np.prod(want)) % rows:
        return
    all_heads = int(np.prod(want)) // rows
    if all_heads % heads == 0:
        group = all_heads // heads

        def layout(x: np.ndarray) -> np.ndarray:
            split = x.reshape(*batch, all_heads, length, width)
            return np.swapaxes(split[..., ::group, :, :], -3, -2)

        yield layout


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


def paired(tap: str, got: np.ndarray, want: np.ndarray) -> tuple[Layout, np.ndarray] | None:
    """The layout that brings torch's value nearest to Flax's, and torch's value in it.

    None if the shapes have nothing to do with each other.
    """
    if point_of(tap) == "scores":
        got, want = hidden(got), hidden(want)
    best: tuple[float, Layout, np.ndarray] | None = None
    for layout in layouts(tap, got.shape, want.shape):
        for factor in factors(tap, want.shape[-1]):
            laid = layout(want) * factor if factor != 1.0 else layout(want)
            error = judge.error(got, laid)
            if best is None or error < best[0]:
                best = error, layout, laid
            if error <= judge.SAME_FUNCTION:
                return layout, laid
    return best and (best[1], best[2])
