"""Changes of rotary positions: the rotation that operations make is measured, and then varied."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import judge
from ..sides.tape import Node
from .fit import newton
from .operation import around
from .replay import Change, Changes
from .rotation import (
    BASES,
    Rotation,
    base_of,
    difference,
    frequencies,
    joined,
    measured,
    pairs,
    powers,
    start,
    wrong_tables,
)
from .span import Cause, Span

LARGE = 1 << 18  # number of elements up to which a rotation is looked for
GRID = np.linspace(1, 8, 113)  # decimal logarithms of bases, of which the best is refined
Varied = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Rotated:
    """A value that torch rotates.

    Attributes:
      first, last: numbers of the value before the rotation, and after it.
      axis: of positions, counted from the end.
      turning: the rotation, of positions on the last axis but one.
    """

    first: int
    last: int
    axis: int
    turning: Rotation

    def varied(self, rotation: Varied) -> Callable[[Any], Any]:
        """A rotation of torch's tensors."""
        import torch

        def evaluate(x: Any) -> Any:
            made = rotation(np.moveaxis(x.numpy(), self.axis, -2))
            return torch.from_numpy(np.ascontiguousarray(np.moveaxis(made, -2, self.axis)))

        return evaluate

    def change(self, rotation: Varied) -> Change:
        """Another rotation in the place of torch's."""
        other = self.varied(rotation)

        def evaluate(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
            return other(more[self.first])

        return Change(evaluate, more=(self.first,))


def rotations(span: Span) -> Iterator[Cause]:
    """All changes of rotations, of those that rotate alike at once and then of each."""
    rotated_values = list(_all_rotated(span, span.nodes))
    if not rotated_values:
        yield from _rotated_too(span)
    for group in _groups(rotated_values):
        yield from _measured(span, group)
        for what, varied in _others(group[0].turning):
            yield Cause(f"rotary {what}", _changes(span, group, varied))
        yield from _other_base(span, group)


def _changes(span: Span, group: Sequence[Rotated], varied: Varied) -> Changes:
    return {span.tape.producers[one.last]: one.change(varied) for one in group}


def _groups(rotated_values: Sequence[Rotated]) -> Iterator[list[Rotated]]:
    """Rotations by the same angles together, then each of them."""
    left = list(rotated_values)
    while left:
        one = left[0].turning
        same = [x for x in left if _same(x.turning, one)]
        # Of one value's rotations, such as that of a part of it and of the whole, the first.
        group = list({x.first: x for x in reversed(same)}.values())
        left = [x for x in left if x not in same]
        yield group
        if len(group) > 1:
            yield from ([x] for x in group)


def _same(one: Rotation, other: Rotation) -> bool:
    sizes = (one.pairing, one.width, one.head, one.table.shape)
    if sizes != (other.pairing, other.width, other.head, other.table.shape):
        return False
    return bool(np.abs(one.table - other.table).max() <= judge.LIKENESS)


def _rotated_too(span: Span) -> Iterator[Cause]:
    """A value that torch does not rotate, such as the values of attention, rotated as another."""
    for one in _all_rotated(span, span.tape.nodes):
        like = span.shape(one.first)
        name = span.operation(span.tape.nodes[span.tape.producers[one.last]]).called(one.first)
        for node in reversed(span.nodes):
            if span.shape(node.outs[0])[-len(like) + 1 :] == like[1:] and not node.several:
                text = f"rotary positions, values turned too, as {name} is"
                yield Cause(text, {node.number: around(one.varied(one.turning))})


def _all_rotated(span: Span, nodes: Sequence[Node]) -> Iterator[Rotated]:
    """The rotations among operations: what has the size of an earlier value at every position."""
    sizes: dict[tuple[int, ...], dict[int, Any]] = {}
    made = {i for node in nodes for i in node.outs if i >= 0}
    numbers = sorted(made | {i for node in nodes for i in node.operands})
    for last in dict.fromkeys(numbers):
        y = span.tape.values[last]
        if not y.is_floating_point() or y.ndim < 3 or not 8 <= y.numel() <= LARGE:
            continue
        known, size = sizes.setdefault(tuple(y.shape), {}), y.square().sum(-1)
        for first, other in reversed(known.items()) if span.tape.producers[last] >= 0 else ():
            rotated = _rotated(span, first, last) if _one_ratio(size, other) else None
            if rotated is not None:
                yield rotated
                break
        known[last] = size


def _one_ratio(one: Any, other: Any) -> bool:
    """Whether two arrays are equal but for one factor."""
    ratio = (one / other).numpy()
    return bool(np.isfinite(ratio).all()) and np.ptp(ratio) <= judge.LIKENESS * ratio.max()


def _rotated(span: Span, first: int, last: int) -> Rotated | None:
    """The rotation from one value to another, if it is one."""
    x, y = (span.tape.values[i].numpy() for i in (first, last))
    for axis in range(-2, -x.ndim - 1, -1):
        turning = measured(*(np.moveaxis(z, axis, -2) for z in (x, y)))
        if turning is not None:
            return Rotated(first, last, axis, turning)
    return None


def _measured(span: Span, group: Sequence[Rotated]) -> Iterator[Cause]:
    """Flax's own rotation, where its value behind one is known."""
    for one in group:
        x = span.tape.values[one.first]
        got = span.target.like_torch(tuple(x.shape))
        if got is None or len(group) > 1:
            continue
        flax = measured(*(np.moveaxis(z, one.axis, -2) for z in (x.numpy(), got)))
        text = "" if flax is None else difference(one.turning, flax)
        if flax is not None and text:
            yield Cause(f"rotary positions, {text}", _changes(span, [one], flax))


def _others(turning: Rotation) -> Iterator[tuple[str, Varied]]:
    """Rotations with other pairs, angles or widths, in words."""
    other = "neighbours" if turning.pairing == "halves" else "halves"
    text = f"pairs of {other}, where torch rotates {turning.pairing}"
    yield text, replace(turning, pairing=other)
    for what, table in (*wrong_tables(turning), *_of_a_grid(turning)):
        yield f"positions, {what}", turning.by(table)
    for what, varied in (*_widths(turning), *_in_part(turning)):
        yield f"positions, {what}", varied


def _of_a_grid(turning: Rotation) -> Iterator[tuple[str, np.ndarray]]:
    """Angles of images: rows for columns, and other units of a position."""
    angles = turning.angles
    length, count = angles.shape
    if count % 2 == 0:
        swapped = np.roll(angles, count // 2, 1)
        yield "rows and columns of a grid exchanged", swapped
        yield (
            "frequencies of the two axes of a grid in turn",
            angles.reshape(length, 2, -1).swapaxes(1, 2).reshape(length, count),
        )
        yield (
            "frequencies of the two axes of a grid one after the other",
            angles.reshape(length, -1, 2).swapaxes(1, 2).reshape(length, count),
        )
    for rows in (n for n in range(2, length) if length % n == 0):
        text = f"positions of a grid by columns, of {rows} rows"
        yield text, angles.reshape(rows, -1, count).swapaxes(0, 1).reshape(length, count)
    step = np.angle(np.exp(1j * (angles[1:2] - angles[:1]))) if length > 1 else angles * 0
    for text, factor in (("2 pi", 2 * np.pi), ("1 / (2 pi)", 1 / (2 * np.pi)), ("pi", np.pi)):
        yield f"in another unit: times {text}", angles * factor
    for by in (0.5, -0.5):
        yield f"{by:g} added, as of a pixel's middle", angles + by * step


def _widths(turning: Rotation) -> Iterator[tuple[str, Varied]]:
    """Other widths: more or fewer components of each head rotated than in torch."""
    base, angles, torch_width = base_of(turning), turning.angles, turning.width
    bases = BASES if base is None else (base, *(b for b in BASES if b != base))
    sign = np.sign(frequencies(turning)[0]) or 1.0
    places = sign * (np.arange(len(angles))[:, None] + start(angles * sign))

    def by(speed: np.ndarray) -> Varied:
        table = np.exp(1j * places * speed)
        return replace(turning, table=table, width=2 * len(speed))

    for width in (w for w in range(2, turning.head + 1, 2) if w != torch_width):
        half = width // 2
        whole = " (the whole head)" if width == turning.head else ""
        text = f"another width: {width} numbers of each head rotated{whole}, "
        text += f"torch rotates {torch_width}"
        yield text, by(powers(bases[0], half))
        yield from ((f"{text}, by base {b:g}", by(powers(b, half))) for b in bases[1:])
        if base is not None:
            text += ", by torch's angles"
            yield text, by(base ** (-np.arange(half) / angles.shape[1]))


def _in_part(turning: Rotation) -> Iterator[tuple[str, Varied]]:
    """Partial rotations, and the tables of one pairing with the pairs of the other."""
    angles, half = turning.angles, turning.width // 2
    few = np.where(np.arange(half) < half // 2, angles, 0.0)
    yield "half of the pairs not rotated", turning.by(few)
    if half > 1:
        table = turning.table[:, : half // 2]
        yield "half of the width rotated", replace(turning, table=table, width=half // 2 * 2)
    twice, each = np.concatenate([angles] * 2, axis=-1), np.repeat(angles, 2, axis=-1)
    for table, pairing in ((twice, "neighbours"), (each, "halves")):

        def mixed(x: np.ndarray, table: np.ndarray = table, pairing: str = pairing) -> np.ndarray:
            part, rest = x[..., : turning.width], x[..., turning.width :]
            a, b = pairs(part, pairing)
            made = part * np.cos(table) + joined(-b, a, pairing) * np.sin(table)
            return np.concatenate([made, rest], axis=-1)

        yield "tables of one pairing, pairs of the other", mixed


def _other_base(span: Span, group: Sequence[Rotated]) -> Iterator[Cause]:
    """Another base of the angles."""
    turning = group[0].turning
    torch_base, angles = base_of(turning), turning.angles
    if torch_base is None:
        return
    sign = np.sign(frequencies(turning)[0])
    places = sign * (np.arange(len(angles))[:, None] + start(angles * sign))

    def base_at(exponent: float) -> float:
        return 10 ** float(np.clip(exponent, -9, 99))

    def changes(exponent: float) -> Changes:
        table = places * powers(base_at(exponent), angles.shape[1])
        return _changes(span, group, turning.by(table))

    def size(exponent: float) -> float:
        made = span.evaluate(changes(exponent))
        gap = None if made is None else span.target.gap(made)
        return np.inf if gap is None else float(np.linalg.norm(np.nan_to_num(gap)))

    exponent = newton(span, changes, float(min(GRID, key=size)))
    fitted = () if exponent is None else (base_at(exponent),)
    for base in (x for c in fitted for x in (float(f"{c:.6g}"), c)):
        text = f"another base of the angles, {base:.8g}, where torch's is {torch_base:.8g}"
        yield Cause(f"rotary positions, {text}", changes(np.log10(base)))
