"""Which value of Flax belongs to which of torch, and how torch's is laid out in Flax's shape."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice, permutations
from typing import Any, NamedTuple

import numpy as np

from .. import judge
from .run import Run

# The points inside attention that torch computes with heads before positions, Flax after.
TRANSPOSED_POINTS = ("query", "key", "value", "context")
# Points that projections are often called by as well.
PROJECTION_POINTS = ("query", "key", "value")
# Torch's fused functions put the scale, or its root, on queries and keys before their product.
SCALED_POINTS = ("query", "key")

# The softmax of a score this far below its row's largest is zero in float64.
MIN_LOG_WEIGHT = np.log(np.finfo(np.float64).smallest_subnormal) - 1
# How many ways to lay out one array are tried.
MAX_LAYOUTS = 24
# Of the way of a layout that leaves out a sink.
SINK = "without the column of a sink"
Shape = tuple[int, ...]


class Layout(NamedTuple):
    """How torch's array lies in Flax's shape: its values, and gradients that arrive at them.

    Two layouts of the same shapes are one if their `way` is.
    """

    value: Callable[[np.ndarray], np.ndarray]
    gradient: Callable[[np.ndarray], np.ndarray]
    way: tuple[Any, ...] = ()

    @classmethod
    def plain(cls, fn: Callable[[np.ndarray], np.ndarray], *way: Any) -> "Layout":
        """One that loses and repeats nothing."""
        return cls(fn, fn, way)


class Match(NamedTuple):
    """Torch's value beside Flax's: in which layout, times what, and the two as they are compared.

    Of scores the value has Flax's constant in each row, which a softmax does not see.
    """

    layout: Layout
    factor: float
    value: np.ndarray
    got: np.ndarray

    def gradient(self, gradient: np.ndarray) -> np.ndarray:
        """Torch's gradient at its value, as it arrives at Flax's."""
        return self.layout.gradient(gradient) / self.factor


def point_of(tap: str) -> str:
    """The last piece of a tap's name, without its count: `"scores"` of `"attn.scores#2"`."""
    return tap.rpartition(".")[2].partition("#")[0]


def layouts(tap: str, shape: Shape, want: Shape) -> Iterator[Layout]:
    """The ways in which an array of torch's shape may lie in Flax's, the plainest first."""
    if shape == want:
        yield Layout.plain(lambda x: x)
    if point_of(tap) in TRANSPOSED_POINTS and len(shape) >= 3:
        yield from _from_merged_batch(shape, want)
    if shape != want:
        for fine, order in ways(shape, want):
            yield Layout.plain(partial(_lay_out, shape, fine, order), fine, order)
    if point_of(tap) in ("scores", "weights") and shape and want[-1:] == (shape[-1] + 1,):
        yield from _less_a_column(tap, shape, want)


def _less_a_column(tap: str, shape: Shape, want: Shape) -> Iterator[Layout]:
    """Where torch has a sink as a column more, the first or the last."""
    for column, columns in ((0, slice(1, None)), (want[-1] - 1, slice(None, -1))):
        for layout in layouts(tap, shape, (*want[:-1], want[-1] - 1)):

            def cut(x: np.ndarray, fn: Any = layout.value, columns: slice = columns) -> np.ndarray:
                return fn(x[..., columns])

            yield Layout.plain(cut, SINK, column, *layout.way)


def _lay_out(shape: Shape, fine: Shape, order: Shape, x: np.ndarray) -> np.ndarray:
    return x.reshape(fine).transpose(order).reshape(shape)


@lru_cache(maxsize=1024)
def ways(shape: Shape, want: Shape) -> tuple[tuple[Shape, Shape], ...]:
    """How axes of `want`, some of them cut, are put in another order and merged to `shape`.

    Each way is the cut shape and the order of its axes; those that cut nothing come first, and then
    those that move least: channels first for last is no mere reshape.

    >>> ways((2, 5, 3, 4), (6, 5, 4))[0]  # B T N H from (B N) T H
    ((2, 3, 5, 4), (0, 2, 1, 3))
    """
    if int(np.prod(shape)) != int(np.prod(want)) or not int(np.prod(want)):
        return ()
    flax_shape, torch_shape = (tuple(n for n in x if n != 1) for x in (shape, want))
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
    """Torch's axes as they are, cut into Flax's, and with one of them cut where Flax has a part."""
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
    """Whether neighbours of `fine` make up `coarse`."""
    rest = list(fine)
    for size in coarse:
        product = 1
        while rest and product < size:
            product *= rest.pop(0)
        if product != size:
            return False
    return not rest


def _joined(fine: Shape, order: Shape) -> tuple[Shape, Shape]:
    """The same way with axes that stay neighbours told as one."""
    runs: list[list[int]] = []
    for axis in order:
        if runs and axis == runs[-1][-1] + 1:
            runs[-1].append(axis)
        else:
            runs.append([axis])
    ranked = sorted(runs)
    sizes = tuple(int(np.prod([fine[i] for i in run])) for run in ranked)
    return sizes, tuple(ranked.index(run) for run in runs)


def _from_merged_batch(shape: Shape, want: Shape) -> Iterator[Layout]:
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
            ("heads after positions",),
        )


def factors(tap: str, width: int) -> tuple[float, ...]:
    """What torch's value may be multiplied with: the place of the scale is each side's own."""
    powers = (0, 0.5, 0.25, -0.5, -0.25) if point_of(tap) in SCALED_POINTS else (0,)
    return tuple(float(width**power) for power in powers)


def hidden(scores: np.ndarray) -> np.ndarray:
    """Scores, -inf wherever a softmax in float64 gives zero: -1e9 hides as well as -inf."""
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
    only: Sequence[Layout] | None = None,
) -> Match | None:
    """Torch's value beside Flax's, laid out in its shape.

    What is no copy of torch's own number, a factor or a constant in each row, is put on only if
    that makes the two equal; with `nearest` a factor wherever it brings them nearer, for narrow
    dtypes, in which nothing is equal. A layout that makes them equal comes before one that does
    not.

    Args:
      shift: whether scores may differ by a constant in each row, since a softmax follows.

      only: the layouts to try, else all.

    Returns:
      None if the shapes have nothing to do with each other.
    """
    if point_of(tap) == "scores":
        got, want = hidden(got), hidden(want)
    candidates: list[tuple[float, Match]] = []
    for layout in layouts(tap, got.shape, want.shape) if only is None else only:
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
    # Of layouts that all differ a clearly nearer one tells more; else the plainest is as good.
    return best if nearest or error < candidates[0][0] / 2 else candidates[0][1]


def agreed(
    got: Run, truth: Run, tap: Callable[[str], str], nearest: bool = False
) -> Iterator[tuple[str, str, Match]]:
    """Every tap that both sides have, in torch's call order: torch's name, Flax's, and the pair.

    Taps of the same shapes are laid out in one way, that which makes most of them equal: a fault
    may look like another order of axes, and where a fault is no layout makes anything equal.
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
    only: Sequence[Layout] | None = None,
) -> Match | None:
    """A tap of torch's beside one of Flax's."""
    point = truth.point(name) or got.point(flax_name)
    flax_value, torch_value = got.taps[flax_name], truth.taps[name]
    return match_value(point, flax_value, torch_value, shifts(truth, name), nearest, only)


def reuse_layouts(
    known: Iterable[tuple[str, str, Match]], got: Run, truth: Run
) -> list[tuple[str, str, Match]]:
    """Every tap of other runs, laid out as it was in those before: narrow values tell no layout."""
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
    """`want` with the constant in each row that brings it nearest to `got`."""
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(invalid="ignore"):
        difference = np.where(finite, got - want, 0.0).sum(axis=-1, keepdims=True)
    return want + difference / np.maximum(finite.sum(axis=-1, keepdims=True), 1)


def shifts(truth: Run, name: str) -> bool:
    """Whether torch's scores go to a softmax along their rows, which sees no constant in a row."""
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
    """Which tap of Flax each of torch's is, by name; and those of one name in other shapes.

    Where a name was heard several times, or in other numbers, values decide which belong together;
    then the place in the order, if both sides heard it as often, and last a shape that fits one
    tap alone. `tap` tells torch's names in Flax's.
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
    """Whether a submodule's output on one side can be a point inside attention on the other.

    What is called as projections often are must be equal: a query is not its projection's output
    where it is turned in between.
    """
    if match is None or truth.point(name) not in PROJECTION_POINTS or got.point(flax_name):
        return match is not None
    return _equal(match.got, match.value)


def _by_base(names: dict[str, str] | dict[str, np.ndarray]) -> dict[str, list[str]]:
    """Names by what they are without their count, in order."""
    groups: dict[str, list[str]] = {}
    for name, value in names.items():
        base = (value if isinstance(value, str) else name).partition("#")[0]
        groups.setdefault(base, []).append(name)
    return groups


def _disambiguate(
    torch_names: list[str], flax_names: list[str], fits: dict[tuple[str, str], Match | None]
) -> dict[str, str]:
    """Of several taps of one name which is which; what nothing tells is left out."""
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
