"""Matches torch's taps to Flax's, and converts torch's values to Flax's layout."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice, permutations
from typing import Any, NamedTuple

import numpy as np

from .. import judge
from .run import Run

# Points inside attention whose heads axis comes before positions in torch, and after in Flax.
TRANSPOSED_POINTS = ("query", "key", "value", "context")
# Points that are common names of projection submodules as well.
PROJECTION_POINTS = ("query", "key", "value")
# Torch's fused functions multiply queries and keys by the scale, or its root, before the product.
SCALED_POINTS = ("query", "key")

# The softmax of a score this far below the row maximum is zero in float64.
MIN_LOG_WEIGHT = np.log(np.finfo(np.float64).smallest_subnormal) - 1
# Number of layouts tried for one array.
MAX_LAYOUTS = 24
# Marks, in `ArrayLayout.way`, a layout that drops an attention sink.
SINK = "without the column of a sink"
Shape = tuple[int, ...]


class ArrayLayout(NamedTuple):
    """Converts torch's values, and their cotangents, to Flax's shape.

    Two layouts of the same shapes are equal if their `way` is.
    """

    value: Callable[[np.ndarray], np.ndarray]
    gradient: Callable[[np.ndarray], np.ndarray]
    way: tuple[Any, ...] = ()

    @classmethod
    def plain(cls, fn: Callable[[np.ndarray], np.ndarray], *way: Any) -> "ArrayLayout":
        """A layout that neither drops nor repeats elements."""
        return cls(fn, fn, way)


class Match(NamedTuple):
    """Torch's value and Flax's as they are compared, with torch's layout and factor.

    The value of scores includes Flax's constant per row, to which softmax is invariant.
    """

    layout: ArrayLayout
    factor: float
    value: np.ndarray
    got: np.ndarray

    def gradient(self, gradient: np.ndarray) -> np.ndarray:
        """Converts torch's gradient of its value to the gradient of Flax's value."""
        return self.layout.gradient(gradient) / self.factor


def point_of(tap: str) -> str:
    """Last component of a tap's name, without its count: `"scores"` of `"attn.scores#2"`."""
    return tap.rpartition(".")[2].partition("#")[0]


def array_layouts(tap: str, shape: Shape, want: Shape) -> Iterator[ArrayLayout]:
    """Yields layouts from torch's shape `want` to Flax's `shape`, the simplest first."""
    if shape == want:
        yield ArrayLayout.plain(lambda x: x)
    if point_of(tap) in TRANSPOSED_POINTS and len(shape) >= 3:
        yield from _from_merged_batch(shape, want)
    if shape != want:
        for fine, order in ways(shape, want):
            yield ArrayLayout.plain(partial(_lay_out, shape, fine, order), fine, order)
    if point_of(tap) in ("scores", "weights") and shape and want[-1:] == (shape[-1] + 1,):
        yield from _less_a_column(tap, shape, want)


def _less_a_column(tap: str, shape: Shape, want: Shape) -> Iterator[ArrayLayout]:
    """Yields layouts that drop torch's attention sink, an extra first or last column."""
    for column, columns in ((0, slice(1, None)), (want[-1] - 1, slice(None, -1))):
        for layout in array_layouts(tap, shape, (*want[:-1], want[-1] - 1)):

            def cut(x: np.ndarray, fn: Any = layout.value, columns: slice = columns) -> np.ndarray:
                return fn(x[..., columns])

            yield ArrayLayout.plain(cut, SINK, column, *layout.way)


def _lay_out(shape: Shape, fine: Shape, order: Shape, x: np.ndarray) -> np.ndarray:
    return x.reshape(fine).transpose(order).reshape(shape)


@lru_cache(maxsize=1024)
def ways(shape: Shape, want: Shape) -> tuple[tuple[Shape, Shape], ...]:
    """Returns the ways to split, transpose and merge the axes of `want` to get `shape`.

    Each way is a split shape and its axis order. Ways without splits come first, then those that
    move the fewest axes: channels first and channels last differ by more than a reshape.

    >>> ways((2, 5, 3, 4), (6, 5, 4))[0]  # B T N H from (B N) T H
    ((2, 3, 5, 4), (0, 2, 1, 3))
    """
    if int(np.prod(shape)) != int(np.prod(want)) or not int(np.prod(want)):
        return ()
    flax_shape, torch_shape = (tuple(n for n in x if n != 1) for x in (shape, want))
    # The same transpose arises from several splits: `_joined` makes them one key.
    costs: dict[tuple[Shape, Shape], tuple[bool, int]] = {}
    for fine in sorted(_cut(flax_shape, torch_shape), key=lambda fine: fine != torch_shape):
        for order in permutations(range(len(fine))):
            permuted = tuple(fine[i] for i in order)
            if _merges(permuted, flax_shape):
                moved = sum(a > b for i, a in enumerate(order) for b in order[i + 1 :])
                whole = fine == torch_shape and permuted == flax_shape
                costs.setdefault(_joined(fine, order), (not whole, moved))
    return tuple(islice(sorted(costs, key=lambda way: (costs[way], len(way[0]))), MAX_LAYOUTS))


def _cut(flax_shape: Shape, torch_shape: Shape) -> set[Shape]:
    """Returns torch's shape unsplit, split into Flax's axes, and with one axis split in two."""
    # The limits bound the permutations: all orders of six axes are 720.
    shapes: set[Shape] = {torch_shape} if len(torch_shape) <= 6 else set()
    if len(flax_shape) <= 6:
        shapes |= {fine for fine in permutations(flax_shape) if _merges(fine, torch_shape)}
    if len(torch_shape) <= 5:
        for i, size in enumerate(torch_shape):
            for part in {n for n in flax_shape if 1 < n < size and size % n == 0}:
                for pieces in ((part, size // part), (size // part, part)):
                    shapes.add((*torch_shape[:i], *pieces, *torch_shape[i + 1 :]))
    return shapes


def _merges(fine: Shape, coarse: Shape) -> bool:
    """Whether merging adjacent axes of `fine` gives `coarse`."""
    rest = list(fine)
    for size in coarse:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest


def _joined(fine: Shape, order: Shape) -> tuple[Shape, Shape]:
    """Returns the same transpose with axes that stay adjacent merged into one."""
    runs: list[list[int]] = []
    for axis in order:
        if runs and axis == runs[-1][-1] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    ranked = sorted(runs)
    sizes = tuple(int(np.prod([fine[i] for i in run])) for run in ranked)
    return sizes, tuple(ranked.index(run) for run in runs)


def _from_merged_batch(shape: Shape, want: Shape) -> Iterator[ArrayLayout]:
    """Yields the layout from torch's `(B N) T H` to `*B T N H`; keys repeated per query once."""
    *batch, length, heads, width = shape
    rows = int(np.prod(batch)) * length * width
    if not rows or want[-2:] != (length, width) or int(np.prod(want)) % rows:
        return
    all_heads = int(np.prod(want)) // rows
    if all_heads % heads == 0:
        # Torch repeats each key head for its group of queries: values take one copy, and its
        # gradient is the sum over all copies.
        group = all_heads // heads

        def split(x: np.ndarray) -> np.ndarray:
            return x.reshape(*batch, heads, group, length, width)

        yield ArrayLayout(
            lambda x: np.swapaxes(split(x)[..., 0, :, :], -3, -2),
            lambda x: np.swapaxes(split(x).sum(axis=-3), -3, -2),
            ("heads after positions",),
        )


def factors(tap: str, width: int) -> tuple[float, ...]:
    """Factors to try on torch's value: each side may apply the scale at another point."""
    powers = (0, 0.5, 0.25, -0.5, -0.25) if point_of(tap) in SCALED_POINTS else (0,)
    return tuple(float(width**power) for power in powers)


def hidden(scores: np.ndarray) -> np.ndarray:
    """Sets scores to -inf where softmax in float64 gives zero: -1e9 masks as well as -inf."""
    if not scores.size:
        return scores
    most = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(scores - most < MIN_LOG_WEIGHT, -np.inf, scores)


def match_value(
    tap: str,
    got: np.ndarray,
    want: np.ndarray,
    shift: bool = False,
    nearest: bool = False,
    only: Sequence[ArrayLayout] | None = None,
) -> Match | None:
    """Matches torch's value `want` to Flax's value `got`; layouts that make them equal win.

    A factor, or a constant per row, is applied only if it makes the two equal.

    Args:
      shift: whether scores may differ by a constant per row, since a softmax follows.
      nearest: whether a factor need only reduce the error: narrow dtypes are never equal.
      only: the layouts to try; None tries all.

    Returns:
      None if no layout fits the shapes.
    """
    if point_of(tap) == "scores":
        got, want = hidden(got), hidden(want)
    candidates: list[tuple[float, Match]] = []
    for layout in array_layouts(tap, got.shape, want.shape) if only is None else only:
        laid_out = layout.value(want)
        for factor in factors(tap, want.shape[-1] if want.ndim else 1):
            match = Match(layout, factor, laid_out if factor == 1.0 else laid_out * factor, got)
            if _equal(got, match.value):
                return match
            if factor == 1.0 or nearest:
                candidates.append((judge.error(got, match.value), match))
        is_integer = SINK not in layout.way
        if shift and is_integer and _equal(got, moved := shifted(got, laid_out)):
            return Match(layout, 1.0, moved, got)
    if not candidates:
        return None
    error, best = min(candidates, key=lambda pair: pair[0])
    # If no layout gives equality, a clearly smaller error decides; else the simplest layout.
    return best if nearest or error < candidates[0][0] / 2 else candidates[0][1]


def agreed(
    got: Run, truth: Run, tap: Callable[[str], str], nearest: bool = False
) -> Iterator[tuple[str, str, Match]]:
    """Yields (torch's name, Flax's name, match) for all common taps, in torch's call order.

    Taps of equal shapes share the layout that makes most of them equal: an error may look like
    another axis order, and at an erroneous tap no layout gives equality.
    """
    pairs, _ = matching_taps(got, truth, tap)
    by_name: dict[str, Match] = {}
    votes: dict[Any, Counter] = {}
    kinds, ways = {}, {}
    for name, flax_name in pairs.items():
        match = _fit(got, truth, flax_name, name, nearest)
        if match is None:
            continue
        by_name[name] = match
        shapes = got.taps[flax_name].shape, truth.taps[name].shape
        kinds[name] = (*shapes, got.point(flax_name) in TRANSPOSED_POINTS)
        ways[kinds[name], match.layout.way] = match.layout
        if _equal(match.got, match.value):
            votes.setdefault(kinds[name], Counter())[match.layout.way] += 1
    for name, match in by_name.items():
        flax_name, voted = pairs[name], votes.get(kinds[name], Counter())
        way = voted.most_common(1)[0][0] if voted else match.layout.way
        if voted[match.layout.way] < voted[way]:
            only = [ways[kinds[name], way]]
            match = _fit(got, truth, flax_name, name, nearest, only) or match
        yield name, flax_name, match


def _fit(
    got: Run,
    truth: Run,
    flax_name: str,
    name: str,
    nearest: bool = False,
    only: Sequence[ArrayLayout] | None = None,
) -> Match | None:
    """Matches the value of torch's tap `name` to that of Flax's tap `flax_name`."""
    point = truth.point(name) or got.point(flax_name)
    flax_value, torch_value = got.taps[flax_name], truth.taps[name]
    return match_value(point, flax_value, torch_value, shifts(truth, name), nearest, only)


def reuse_layouts(
    known: Iterable[tuple[str, str, Match]], got: Run, truth: Run
) -> list[tuple[str, str, Match]]:
    """Matches taps of other runs by known layouts, which narrow dtypes cannot determine."""
    pairs = []
    for name, flax_name, match in known:
        if name not in truth.taps or flax_name not in got.taps:
            continue
        mine, value = got.taps[flax_name], match.layout.value(truth.taps[name]) * match.factor
        if (truth.point(name) or got.point(flax_name)) == "scores":
            mine, value = hidden(mine), hidden(value)
        pairs.append((name, flax_name, Match(match.layout, match.factor, value, mine)))
    return pairs


def _equal(got: np.ndarray, want: np.ndarray) -> bool:
    return judge.same_function(got, want, zero=True).ok


def shifted(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Adds the constant to each row of `want` that brings it closest to `got`."""
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore"):
        difference = np.where(finite, got - want, 0.0).sum(axis=-1, keepdims=True)
    return want + difference / np.maximum(finite.sum(axis=-1, keepdims=True), 1)


def shifts(truth: Run, name: str) -> bool:
    """Whether torch's scores feed a softmax over rows, which ignores a constant per row."""
    if truth.point(name) != "scores":
        return False
    owner, dot, point = name.rpartition(".")
    weights = truth.taps.get(f"{owner}{dot}{point.replace('scores', 'weights')}")
    scores = truth.taps[name]
    if weights is None or weights.shape != scores.shape or not scores.size:
        return weights is None
    most = scores.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        powers = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
        total = powers.sum(axis=-1, keepdims=True)
    return judge.allclose(powers / np.where(total, total, 1.0), weights)


def matching_taps(
    got: Run, truth: Run, tap: Callable[[str], str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Maps torch's tap names to Flax's; also returns pairs of one name whose shapes differ.

    Taps recorded repeatedly under a name are paired by value; then by order if both sides recorded
    equally many; last by a shape that fits only one. `tap` maps torch's names to Flax's.
    """
    pairs: dict[str, str] = {}
    shapes: dict[str, str] = {}
    torch_taps, flax_taps = _by_base({name: tap(name) for name in truth.taps}), _by_base(got.taps)
    for base, torch_names in torch_taps.items():
        flax_names = flax_taps.get(base, [])
        fits = {(a, b): _fit(got, truth, b, a) for a in torch_names for b in flax_names}
        kinds = [
            (
                [a for a in torch_names if bool(truth.point(a)) is is_point],
                [b for b in flax_names if bool(got.point(b)) is is_point],
            )
            for is_point in (False, True)
        ]
        partners: dict[str, str] = {}
        for one, other in kinds:
            partners |= _disambiguate(one, other, fits)
        left = [[x for x in kind if x not in partners.values()] for _, kind in kinds]
        odd = [[x for x in kind if x not in partners] for kind, _ in kinds]
        for one, other in zip(odd, left[::-1], strict=True):
            plausible = {ab: fits[ab] for ab in fits if _may_match(got, truth, *ab, fits[ab])}
            partners |= _disambiguate(one, other, dict.fromkeys(fits) | plausible)
        pairs |= partners
        for one, other in zip(odd, left, strict=True):
            rest = (
                [a for a in one if a not in partners],
                [b for b in other if b not in partners.values()],
            )
            shapes |= {a: b for a, b in zip(*rest, strict=False) if fits[a, b] is None}
    order = [name for name in truth.taps if name in pairs]
    return {name: pairs[name] for name in order}, shapes


def _may_match(got: Run, truth: Run, name: str, flax_name: str, match: Match | None) -> bool:
    """Whether a submodule's output on one side may match a point inside attention on the other.

    Points named like projections must be equal: a query is not the output of its projection if it
    is rotated in between.
    """
    if match is None or truth.point(name) not in PROJECTION_POINTS or got.point(flax_name):
        return match is not None
    return _equal(match.got, match.value)


def _by_base(names: dict[str, str] | dict[str, np.ndarray]) -> dict[str, list[str]]:
    """Groups names by their base, the name without its count, in order."""
    groups: dict[str, list[str]] = {}
    for name, value in names.items():
        base = (value if isinstance(value, str) else name).partition("#")[0]
        groups.setdefault(base, []).append(name)
    return groups


def _disambiguate(
    torch_names: list[str], flax_names: list[str], fits: dict[tuple[str, str], Match | None]
) -> dict[str, str]:
    """Pairs the taps of one name by value, order and shape; ambiguous taps are left out."""
    pairs: dict[str, str] = {}

    def free(a: str) -> list[str]:
        return [b for b in flax_names if b not in pairs.values() and fits[a, b] is not None]

    def equal(a: str, b: str) -> bool:
        match = fits[a, b]
        return match is not None and _equal(match.got, match.value)

    places = list(zip(torch_names, flax_names, strict=False))
    pairs |= {a: b for a, b in places if equal(a, b)}
    for a in torch_names:
        if a not in pairs:
            pairs |= dict([(a, b) for b in free(a) if equal(a, b)][:1])
    if len(torch_names) == len(flax_names):
        pairs |= {a: b for a, b in places if a not in pairs and b in free(a)}
    left = [a for a in torch_names if a not in pairs]
    for a in left:
        alone = [b for b in free(a) if [c for c in left if fits[c, b]] == [a]]
        if len(alone) == 1 == len(free(a)):
            pairs[a] = alone[0]
    return pairs
