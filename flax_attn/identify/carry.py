"""Rules that carry the matrices of an attention from torch's parameters to our projections."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from ..weights.layout import axes_of, axis_groups, lay_out, sizes_of
from ..weights.rule import Rule
from .matrices import Matrix, Piece
from .roles import Unclear

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Wanted:
    """Where a Flax parameter's numbers are in torch.

    Attributes:
      path: of the Flax parameter.
      pieces: for each head; a name for all, or one for each.
      axes: names and sizes of the axes of all pieces, stacked.
      right: the Flax parameter's layout.
    """

    path: str
    pieces: tuple[Piece, ...]
    axes: Mapping[str, int]
    right: str

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(piece.name for piece in self.pieces))

    @property
    def index(self) -> np.ndarray:
        """Flat indices in the parameter, with the axes."""
        stacked = np.stack([piece.index for piece in self.pieces])
        return stacked.reshape(tuple(self.axes.values()))


def wanted_of(path: str, matrix: Matrix, kv_heads: int, output: bool = False) -> Iterator[Wanted]:
    """What the kernel and the bias of a projection want."""
    heads = {"k": kv_heads, "g": len(matrix.weights) // kv_heads}
    width, features = matrix.weights[0].index.shape
    right = "(k g h) i" if output else "i (k g h)"
    axes = {**heads, "h": width, "i": features}
    yield Wanted(f"{path}.kernel", matrix.weights, axes, right)
    if matrix.biases is not None and output:
        yield Wanted(f"{path}.bias", matrix.biases, {"i": matrix.biases[0].index.size}, "i")
    elif matrix.biases is not None:
        yield Wanted(f"{path}.bias", matrix.biases, {**heads, "h": width}, "(k g h)")


def rules_for(wanted: Sequence[Wanted], shapes: Mapping[str, Shape]) -> list[Rule]:
    """Rules that fill all that is wanted.

    Raises:
      Unclear: for an order of numbers that no rule says.
    """
    rules: list[Rule] = []
    single = [w for w in wanted if len(w.names) == 1]
    rules += [_of_list(w, shapes) for w in wanted if len(w.names) > 1]
    by_name = sorted(single, key=lambda w: list(shapes).index(w.names[0]))
    for name, group in groupby(by_name, key=lambda w: w.names[0]):
        parts = sorted(group, key=lambda w: int(w.index.min()))
        rules.append(_one(parts[0], shapes) if len(parts) == 1 else _fused(name, parts, shapes))
    return rules


def _strides(index: np.ndarray, axes: Mapping[str, int]) -> dict[str, int]:
    """By how much an index grows along each axis longer than one.

    Raises:
      Unclear: if the growth is not even.
    """
    corner = (0,) * index.ndim
    strides = {
        axis: int(index[tuple(int(a == i) for a in range(index.ndim))] - index[corner])
        for i, axis in enumerate(axes)
        if index.shape[i] > 1
    }
    grid = np.indices(index.shape)
    sums = [strides[axis] * grid[i] for i, axis in enumerate(axes) if axis in strides]
    if not np.array_equal(index, index[corner] + sum(sums)):
        raise Unclear("a parameter whose rows are in no even order")
    return strides


def _left(strides: Mapping[str, int], sizes: Mapping[str, int], shape: Shape) -> str:
    """The layout of an array whose axes have these strides."""
    axes = sorted(strides, key=lambda axis: -strides[axis])
    groups = []
    for size in shape:
        group: list[str] = []
        while int(np.prod([sizes[a] for a in group])) < size and axes:
            group.append(axes.pop(0))
        if int(np.prod([sizes[a] for a in group])) != size:
            raise Unclear("a parameter whose axes are no products of heads and features")
        groups.append(group)
    if axes:
        raise Unclear("a parameter whose axes are no products of heads and features")
    return " ".join(_bracket(group) for group in groups)


def _bracket(group: Sequence[str]) -> str:
    return "1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})"


def _without(layout: str, axes: Mapping[str, int]) -> str:
    """A side without the axes that are not longer than one."""
    groups = [[a for a in axes_of(group) if axes[a] > 1] for group in axis_groups(layout)]
    return " ".join(_bracket(group) for group in groups if group)


def _one(wanted: Wanted, shapes: Mapping[str, Shape]) -> Rule:
    name, shape = wanted.names[0], shapes[wanted.names[0]]
    if wanted.index.size != int(np.prod(shape)):
        raise Unclear(f"only a part of {name} is used")
    left = _left(_strides(wanted.index, wanted.axes), wanted.axes, shape)
    right = _without(wanted.right, wanted.axes)
    return _rule(f"{name} -> {wanted.path}", left, right, wanted.axes)


def _rule(names: str, left: str, right: str, sizes: Mapping[str, int]) -> Rule:
    """A rule, in the fewest axes."""
    left, right, sizes = _merged(left, right, dict(sizes))
    rows = [axis for axis in axes_of(left) if axis in ("k", "g", "h")]
    if len(rows) == 1:  # all heads' components: the inputs of the last projection, else outputs
        plain = {rows[0]: "i", "i": "o"} if right == f"{rows[0]} i" else {rows[0]: "o", "i": "i"}
        pattern = rf"\b({'|'.join(plain)})\b"
        left, right = (re.sub(pattern, lambda x: plain[x[0]], side) for side in (left, right))
        sizes = {plain.get(axis, axis): size for axis, size in sizes.items()}
    if left == right and "(" not in left:
        return Rule(names)
    open_axes = {a for side in (left, right) for g in axis_groups(side) for a in axes_of(g)[1:]}
    shown = {a: n for a, n in sizes.items() if a in open_axes and a in axes_of(left)}
    return Rule(names, f"{left} -> {right}", **_enough(left, shown))


def _enough(left: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that shapes do not determine: of each bracket all but one."""
    inside = [axes_of(g)[1:] for g in axis_groups(left)]
    return {a: sizes[a] for group in inside for a in group if a in sizes}


def _merged(left: str, right: str, sizes: dict[str, int]) -> tuple[str, str, dict[str, int]]:
    """Two axes that follow each other on both sides become one."""
    for group in axis_groups(left):
        axes = axes_of(group)
        for one, other in pairwise(axes):
            pair = f"{one} {other}"
            if pair in right and pair in left and "n" not in (one, other):
                sizes = {**sizes, one: sizes[one] * sizes[other]}
                left, right = (
                    side.replace(pair, one).replace(f"({one})", one) for side in (left, right)
                )
                return _merged(left, right, sizes)
    return left, right, sizes


def _of_list(wanted: Wanted, shapes: Mapping[str, Shape]) -> Rule:
    """A rule for one parameter for each head."""
    if len(wanted.names) != len(wanted.pieces) or wanted.axes.get("g", 1) > 1:
        raise Unclear("some heads share a parameter, and others do not")
    first = wanted.pieces[0].index
    if any(not np.array_equal(p.index, first) for p in wanted.pieces):
        raise Unclear("heads whose parameters differ in layout")
    names = [piece.name for piece in wanted.pieces]
    axes = {a: n for a, n in wanted.axes.items() if a not in ("k", "g")}
    left = _left(_strides(first, axes), axes, shapes[names[0]])
    right = _without(wanted.right, wanted.axes).replace("k", "n")
    return Rule(f"{_braces(names)} -> {wanted.path}", f"n {left} -> {right}")


def _braces(names: Sequence[str]) -> str:
    """Names that differ in one piece, with braces."""
    split = [name.split(".") for name in names]
    same = len({len(x) for x in split}) == 1
    places = [i for i in range(len(split[0])) if len({x[i] for x in split}) > 1] if same else []
    if len(places) != 1:
        raise Unclear("the names of the heads' parameters differ in several pieces")
    at = places[0]
    inside = "{" + ",".join(x[at] for x in split) + "}"
    return ".".join([*split[0][:at], inside, *split[0][at + 1 :]])


def _fused(name: str, parts: Sequence[Wanted], shapes: Mapping[str, Shape]) -> Rule:
    """A rule for a parameter that is that of several projections."""
    ends = [part.path.rsplit(".", 1) for part in parts]
    if len({end for _, end in ends}) != 1:
        raise Unclear(f"{name} is of projections and biases")
    names = f"{name} -> {{{','.join(path for path, _ in ends)}}}.{ends[0][1]}"
    shape = shapes[name]
    if sum(part.index.size for part in parts) != int(np.prod(shape)):
        raise Unclear(f"only a part of {name} is used")
    for rule in _candidates(names, parts, shape):
        if _fills(rule, parts, shape):
            return rule
    raise Unclear(f"{name} has its rows in an order that no rule says")


def _candidates(names: str, parts: Sequence[Wanted], shape: Shape) -> Iterator[Rule]:
    first = parts[0]
    right = _without(first.right, first.axes)
    inner = right.replace("k g h", "o").replace("k h", "o").replace("g h", "o")
    inner = inner.replace("h", "o").replace("(o)", "o")
    if all(dict(part.axes) == dict(first.axes) for part in parts):
        starts = [int(part.index.min()) for part in parts]
        steps = {other - one for one, other in pairwise(starts)}
        if len(steps) == 1:
            strides = {**_strides(first.index, first.axes), "n": steps.pop()}
            sizes = {**first.axes, "n": len(parts)}
            yield _rule(names, _left(strides, sizes, shape), f"n {right}", sizes)
    sides = ["(n o) i", "i (n o)"] if "i" in axes_of(first.right) else ["(n o)"]
    outs = tuple(part.index.size // part.axes.get("i", 1) for part in parts)
    for left in sides:
        yield Rule(names, f"{left} -> n {inner}", o=outs)
    groups = tuple(part.axes["g"] for part in parts)
    whole = inner.replace("o", "(k o h)")
    for left in sides:
        left = left.replace("n o", "k n o h")
        yield Rule(names, f"{left} -> n {whole}", o=groups, h=first.axes["h"])


def _fills(rule: Rule, parts: Sequence[Wanted], shape: Shape) -> bool:
    """Whether a rule gives every part its numbers, in our order."""
    assert rule.layout is not None
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        sizes = sizes_of(rule.layout, [shape], len(parts), dict(rule.sizes))
        made = lay_out([numbers], rule.layout, len(parts), sizes)
    except (ValueError, KeyError, IndexError):
        return False
    return all(np.array_equal(x, _as_flax(part)) for x, part in zip(made, parts, strict=True))


def _as_flax(part: Wanted) -> np.ndarray:
    """The numbers of a part as the Flax parameter has them."""
    axes = " ".join(part.axes)
    return lay_out([part.index], f"{axes} -> {part.right}", 1, {})[0]
