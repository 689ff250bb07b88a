"""Other operands: an earlier or later value of the same shape, and two parts exchanged."""

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from ..sides.tape import Node, Ref
from .operation import Operation, with_arguments
from .replay import Change
from .span import Cause, Span

MANY = 24  # number of other values that are tried for one operand, the nearest first
SLICES = 6  # number of slices of one array of which two are exchanged


def other_operands(span: Span) -> Iterator[Cause]:
    """Another value in the place of an operand."""
    by_shape = _by_shape(span)
    for what, nodes in span.sites:
        node = nodes[0]
        op = span.operation(node)
        for place, x in enumerate(node.args):
            if not isinstance(x, Ref):
                continue
            tensor = span.tape.values[x.value]
            others = by_shape.get((tuple(tensor.shape), tensor.dtype), ())
            near = sorted(others, key=lambda y: (y not in span.labels, abs(y - x.value)))
            for other in [y for y in near if y != x.value][:MANY]:
                changes = _each(span, nodes, place, other - x.value, other)
                if changes:
                    sentence = _other_text(op, place, op.called(other))
                    yield Cause(f"{sentence}{what}", changes)


def _other_text(op: Operation, place: int, other: str) -> str:
    label = op.label(place)
    if op.name in ("add", "sub", "mul"):
        word = "factor" if op.name == "mul" else "residual or part"
        return f"another {word}: {other}, where torch takes {label}"
    return f"{other} in the place of {label}: another operand of {op}"


def _each(span: Span, nodes: list[Node], place: int, by: int, other: int) -> dict[int, Change]:
    """The same exchange at each of several operations, as in every step of a loop."""
    changes = {}
    for node in nodes:
        x = node.args[place] if place < len(node.args) else None
        if not isinstance(x, Ref):
            return {}
        number = other if len(nodes) == 1 else x.value + by
        fits = 0 <= number < len(span.tape.values)
        if not fits or span.tape.values[number].shape != span.tape.values[x.value].shape:
            number = other
        if not _depends(span, number, node):
            changes[node.number] = Change(operands={place: number})
    return changes


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


def _by_shape(span: Span) -> dict[tuple[Any, ...], list[int]]:
    """Different values by shape and dtype: those of the span, and those with names."""
    numbers = {x for node in span.nodes for x in (*node.operands, *node.outs) if x >= 0}
    numbers |= {*span.labels}
    seen: set[bytes] = set()
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in sorted(numbers):
        x = span.tape.values[number]
        data = x.resolve_conj().contiguous().numpy().tobytes() if x.numel() < 1 << 16 else b""
        key = data + str(x.shape).encode()
        if x.numel() > 1 and (not data or key not in seen):
            seen.add(key)
            groups.setdefault((tuple(x.shape), x.dtype), []).append(number)
    return groups


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
