"""Other operands: an earlier or later value of the same shape, and two parts exchanged."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from ..sides.tape import Node, Ref
from .operation import Operation, exchanged, with_arguments
from .replay import Change
from .span import Cause, Span

MANY = 24  # number of other values that are tried for one operand, the nearest first
# Operations that spread an operand over the shape of the other one.
SPREADING = ("add", "sub", "mul", "div", "maximum", "minimum", "where")
# Operations that write a part of an array, as of a cache.
WRITES = ("slice_scatter", "select_scatter", "index_put", "index_copy", "scatter", "copy")
LARGE = 1 << 16  # number of elements from which values are not compared
SLICES = 6  # number of slices of one array of which two are exchanged

# An order of axes; None as they are.
Order = tuple[int, ...] | None


def other_operands(span: Span) -> Iterator[Cause]:
    """Another value in the place of an operand."""
    values = _Values(span)
    for what, nodes in span.sites:
        node = nodes[0]
        op = span.operation(node)
        for place, x in enumerate(node.args):
            if not isinstance(x, Ref):
                continue
            spread = node.outs[0] if node.name in SPREADING else -1
            for other, order in values.others(x.value, spread):
                if span.is_parameter(other) != span.is_parameter(x.value):
                    continue
                changes = _each(span, nodes, place, other - x.value, other, order)
                if changes:
                    permuted = f", its axes in the order {list(order)}" if order else ""
                    sentence = _other_text(op, place, f"{op.called(other)}{permuted}")
                    yield Cause(f"{sentence}{what}", changes)


def stale(span: Span) -> Iterator[Cause]:
    """What was there before it was written, where it is read: of one array, then of all."""
    everywhere: dict[int, dict[int, int]] = {}
    texts = []
    for node in (node for node in span.nodes if node.name in WRITES):
        before, out = node.args[0].value, node.outs[0]
        places = {
            user.number: {i: before for i, x in enumerate(user.args) if x == Ref(out)}
            for user in span.nodes
            if out in user.operands
        }
        for number, operands in places.items():
            everywhere[number] = {**everywhere.get(number, {}), **operands}
        op = span.operation(node)
        texts.append(f"{op.called(before)} as it was before {op}: a stale state, read too early")
        yield Cause(texts[-1], {n: Change(operands=x) for n, x in places.items()})
    if len(texts) > 1:
        changes = {number: Change(operands=x) for number, x in everywhere.items()}
        yield Cause("; and ".join(texts), changes)


def _other_text(op: Operation, place: int, other: str) -> str:
    label = op.label(place)
    if op.name in ("add", "sub", "mul"):
        word = "factor" if op.name == "mul" else "residual or part"
        return f"another {word}: {other}, where torch takes {label}"
    return f"{other} in the place of {label}: another operand of {op}"


def _each(
    span: Span, nodes: list[Node], place: int, by: int, other: int, order: Order
) -> dict[int, Change]:
    """The same exchange at each of several operations, as in every step of a loop."""
    changes = {}
    for node in nodes:
        x = node.args[place] if place < len(node.args) else None
        if not isinstance(x, Ref):
            return {}
        number = other if len(nodes) == 1 else x.value + by
        fits = 0 <= number < len(span.tape.values)
        if not fits or span.tape.values[number].shape != span.tape.values[other].shape:
            number = other
        if not _depends(span, number, node):
            changes[node.number] = _exchange(place, number, order)
    return changes


def _exchange(place: int, number: int, order: Order) -> Change:
    if order is None:
        return Change(operands={place: number})

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more: Any) -> Any:
        return func(*exchanged(args, {place: more[number].permute(order).contiguous()}), **kwargs)

    return Change(change, more=(number,))


def _depends(span: Span, value: int, node: Node) -> bool:
    """Whether a value is computed from an operation's result."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        producer = span.tape.producers[one]
        if one in seen or one in span.bounds or producer < node.number:
            continue
        seen.add(one)
        if producer == node.number:
            return True
        left += span.tape.nodes[producer].operands
    return False


class _Values:
    """All values of a program by their sizes, to be tried in the place of one another."""

    def __init__(self, span: Span):
        self.span = span
        self.inner = {x for node in span.nodes for x in (*node.operands, *node.outs) if x >= 0}
        self.inner |= {*span.labels}
        self.by_sizes: dict[tuple[Any, ...], list[int]] = {}
        self.unique: dict[tuple[Any, ...], list[int]] = {}
        for number, x in enumerate(span.tape.values):
            if x.numel() > 1:
                self.by_sizes.setdefault((*sorted(x.shape), x.dtype), []).append(number)

    def others(self, value: int, out: int) -> Iterator[tuple[int, Order]]:
        """Values for the place of another one, the likely first, with an order of their axes.

        `out` is the number of the result that operands spread over, or -1.
        """
        x = self.span.tape.values[value]
        same, permuted = [], []
        for number in self._different((*sorted(x.shape), x.dtype)):
            y = self.span.tape.values[number]
            (same if y.shape == x.shape else permuted).append(number)
        inner = [y for y in same if y in self.inner]
        plain = [*self._nearest(inner, value)]
        plain += self._nearest(self._spread(out), value) if out >= 0 else []
        plain += self._nearest([y for y in same if y not in self.inner], value)
        yield from ((y, None) for y in plain)
        for y in self._nearest(permuted, value):
            yield y, _order(tuple(self.span.tape.values[y].shape), tuple(x.shape))

    def _nearest(self, numbers: Sequence[int], value: int) -> list[int]:
        ordered = sorted(numbers, key=lambda y: (y not in self.span.labels, abs(y - value)))
        return [y for y in ordered if y != value][:MANY]

    def _different(self, sizes: tuple[Any, ...]) -> list[int]:
        """The values of these sizes, of equal ones the first."""
        if sizes not in self.unique:
            seen = {}
            for number in self.by_sizes.get(sizes, ()):
                x = self.span.tape.values[number]
                small = x.numel() < LARGE
                data = x.resolve_conj().contiguous().numpy().tobytes() if small else number
                seen.setdefault((data, x.shape), number)
            self.unique[sizes] = [*seen.values()]
        return self.unique[sizes]

    def _spread(self, out: int) -> list[int]:
        """Values of the span that spread to a result's shape, such as one number a channel."""
        like = self.span.tape.values[out]
        return [
            number
            for sizes, numbers in self.by_sizes.items()
            if sizes[-1] == like.dtype and len(sizes) - 1 <= like.ndim
            for number in numbers
            if number in self.inner and _spreads(self.span.shape(number), tuple(like.shape))
        ]


def _spreads(other: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    sizes = zip(other[::-1], shape[::-1], strict=False)
    return all(m in (1, n) for m, n in sizes)


def _order(have: tuple[int, ...], want: tuple[int, ...]) -> tuple[int, ...]:
    """An order of axes in which sizes are as wanted, equal ones in their order.

    >>> _order((2, 5, 3), (2, 3, 5))
    (0, 2, 1)
    """
    left = [*range(len(have))]
    order = []
    for size in want:
        axis = next(i for i in left if have[i] == size)
        left.remove(axis)
        order.append(axis)
    return tuple(order)


def exchanged_slices(span: Span) -> Iterator[Cause]:
    """Two parts of one array exchanged, such as a manually split projection."""
    families: dict[tuple[Any, ...], list[Node]] = {}
    for node in span.nodes:
        if node.name in ("slice", "select") and len(node.args) > 2:
            shape = tuple(span.tape.values[node.outs[0]].shape)
            key = (node.args[0], node.name, node.args[1], shape)
            families.setdefault(key, []).append(node)
    for nodes in families.values():
        for one, two in combinations(nodes[:SLICES], 2):
            op = span.operation(one)
            swap = {
                a.number: with_arguments(dict(enumerate(b.args[1:], 1)))
                for a, b in ((one, two), (two, one))
            }
            yield Cause(
                f"two parts of {op.label(0)} exchanged: another order of {_from(one)} and "
                f"{_from(two)}",
                swap,
            )


def _from(node: Node) -> str:
    return f"the one from {node.args[2]}" if node.name == "slice" else f"element {node.args[2]}"
