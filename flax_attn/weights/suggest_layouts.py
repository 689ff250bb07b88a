"""Layouts that may convert one torch tensor to one Flax Param, the likeliest first."""

from collections.abc import Iterable, Iterator
from itertools import product
from string import ascii_lowercase

from .einops_layout import Size, axis_sizes, backwards, expand

# Layouts to try, the likeliest first: torch's weights have outputs first; plain Parameters and
# transformers' Conv1D have inputs first.
ONE_TO_ONE = {
    "out first": ("o i -> i o", "o i ... -> ... i o", "(h k) i -> i h k", "o (h k) -> h k o"),
    "in first": ("i (h k) -> i h k", "(h k) o -> h k o", "i o -> o i"),
    "either": ("(h k) -> h k", "h k -> (h k)", "i h k -> i (h k)", "h k o -> (h k) o"),
}


def fitting_layout(
    shape: tuple[int, ...], want: tuple[int, ...], way: str, is_transposed: bool = False
) -> tuple[str, dict[str, Size]] | None:
    """Returns the likeliest layout from `shape` to `want`, and the sizes to specify, or None.

    `is_transposed` says that outputs come first on one side and last on the other.

    >>> fitting_layout((5, 3, 1, 1), (3, 5), "out first")  # a 1x1 convolution, and a Linear
    ('o i 1 1 -> i o', {})
    >>> fitting_layout((3, 8, 20), (24, 20), "in first")  # heads of an output, and a Linear
    ('h k o -> (h k) o', {'h': 3})
    >>> fitting_layout((5, 3, 1, 1), (5, 3), "out first", is_transposed=True)  # another Linear
    """
    known, ones = ONE_TO_ONE[way], _around_ones(shape, want)
    if is_transposed and sum(size != 1 for size in want) > 1:
        ones = []  # would keep the axes in their order
    pointwise = [*_with_ones(known, shape, want)]
    layouts = (*known, *pointwise, *ones) if way == "out first" else (*ones, *known, *pointwise)
    for layout in (*layouts, *ONE_TO_ONE["either"]):
        sizes = sizes_both_ways(layout, shape, want, {})
        if sizes is not None:
            return layout, {k: v for k, v in sizes.items() if k == "h" and "(" in layout}
    return None


def _with_ones(
    layouts: Iterable[str], shape: tuple[int, ...], want: tuple[int, ...]
) -> Iterator[str]:
    """Yields the layouts with torch's trailing and Flax's leading axes of size 1 added."""
    sides = []
    for of in (shape[::-1], want):
        count = next((i for i, size in enumerate(of) if size != 1), len(of))
        sides.append(range(min(count, len(of) - 2), -1, -1))
    for behind, before in product(*sides):
        for layout in layouts if behind or before else ():
            left, _, right = layout.partition(" -> ")
            yield f"{left}{' 1' * behind} -> {'1 ' * before}{right}"


def _around_ones(shape: tuple[int, ...], want: tuple[int, ...]) -> list[str]:
    """Returns the layout `1 a 1 -> a` of shapes that differ only in axes of size 1, if they do."""
    sides = []
    for of in (shape, want):
        letters = iter(ascii_lowercase)
        sides.append(" ".join("1" if size == 1 else next(letters, "") for size in of))
    wide = [[size for size in of if size != 1] for of in (shape, want)]
    return [" -> ".join(sides)] if wide[0] == wide[1] and shape != want else []


def sizes_both_ways(
    layout: str, shape: tuple[int, ...], want: tuple[int, ...], fixed: dict[str, int]
) -> dict[str, int] | None:
    """Returns all axis sizes if a layout converts one shape to the other, else None."""
    try:
        sizes, layout = dict(fixed), expand(layout, len(shape))
        for side, of in ((layout, shape), (backwards(layout), want)):
            if "(" not in side.partition("->")[0]:
                sizes |= axis_sizes(side, of, 1, fixed)
        forth = axis_sizes(layout, shape, 1, sizes)
        back = axis_sizes(backwards(layout), want, 1, forth)
    except ValueError:
        return None
    return forth if forth == back else None
