"""Changes of several operations in a row: left out, replaced by one function, applied twice.

A submodule or a formula is such a row: one value enters it, and one of the same shape leaves it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..sides.tape import INPUT, PARAMETER, Node, Ref, Tape, mapped
from .elements import functions
from .operation import VIEWS, described, first
from .replay import Change
from .span import Cause, Span

NEXT = 6  # number of operations behind a row after which it is tried
NEAREST = 4  # number of earlier values from which rows to one value begin, beside the first


@dataclass(frozen=True)
class Chain:
    """Operations between a value and the only value that they compute from it.

    Attributes:
      tape: the program that they are part of.
      nodes: the operations, in order.
      start: number of the value that enters.
    """

    tape: Tape
    nodes: Sequence[Node]
    start: int

    @property
    def last(self) -> Node:
        return self.nodes[-1]

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Numbers of the other values that the operations need."""
        made = {number for node in self.nodes for number in node.outs}
        used = [number for node in self.nodes for number in node.operands]
        return tuple(x for x in dict.fromkeys(used) if x not in made and x != self.start)

    def applied(self, x: Any, others: Any) -> Any:
        """The result for another value at the start."""
        made = {**others, self.start: x}

        def fill(y: Any) -> Any:
            return made[y.value] if isinstance(y, Ref) else y

        for node in self.nodes:
            args = [mapped(y, fill) for y in node.args]
            out = node.func(*args, **{k: mapped(y, fill) for k, y in node.kwargs.items()})
            results = out if node.several else [out]
            made |= {i: y for i, y in zip(node.outs, results, strict=False) if i >= 0}
        return made[self.last.outs[0]]


def chains(span: Span) -> Iterator[Cause]:
    """All changes of rows of two or more operations, those of the last operation first."""
    through = dominators(span)
    for what, nodes in span.sites:
        rows = [_rows_to(span, through, node) for node in nodes]
        for few in zip(*rows, strict=False):
            for sentence, changes in _changed(span, few):
                yield Cause(f"{sentence}{what}", changes)
    for node in span.nodes:
        starts = [x for x in node.operands if span.shape(x) == span.shape(node.outs[0])]
        for start in starts if node.name in ("mul", "div", "add", "sub") else ():
            row = Chain(span.tape, [node], start)
            for sentence, changes in _after_others(span, row, described(node)):
                yield Cause(sentence, changes)


def capped(span: Span) -> Iterator[tuple[Chain, float]]:
    """The rows that are a softcap, and their caps."""
    through = dominators(span)
    for node in span.nodes:
        for row in _rows_to(span, through, node) if node.name in ("mul", "div") else ():
            numbers = [x for x in node.args if isinstance(x, int | float)]
            if numbers and _name(span, row) == "the softcap":
                yield row, float(numbers[0])


def gates(span: Span) -> Iterator[Cause]:
    """What leads to one factor of a product on the other factor, as of a gate and its value."""
    through = dominators(span)
    for node in span.nodes:
        refs = [x.value for x in node.args if isinstance(x, Ref)]
        if node.name != "mul" or len(refs) != 2 or len({span.shape(x) for x in refs}) > 1:
            continue
        for place in (0, 1):
            gate, other = refs[place], refs[1 - place]
            for start in [x for x in through.get(gate, ()) if span.shape(x) == span.shape(gate)]:
                row = Chain(span.tape, _inner(span, start, _node_of(span, gate)), start)
                op = span.operation(node)
                text = f"{op.called(other)} as the gate of {op.called(start)}, where torch takes "
                text += f"{op.called(start)}: the activation on the other factor"
                yield Cause(text, {node.number: _on_the_other(row, 1 - place)})


def _node_of(span: Span, value: int) -> Node:
    return span.tape.nodes[span.tape.producers[value]]


def _on_the_other(row: Chain, place: int) -> Change:
    def change(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
        return func(row.applied(args[place], more), more[row.start], **kwargs)

    return Change(change, more=(row.start, *row.others))


def dominators(span: Span) -> dict[int, list[int]]:
    """For each value the values through which all that it is computed from passes, nearest first.

    Parameters, buffers and constants do not count.
    """
    inputs = {v for k, v in span.tape.marks.items() if k.startswith(INPUT)}
    through: dict[int, list[int]] = {}
    for node in span.nodes:
        operands = dict.fromkeys(node.operands)
        data = [x for x in operands if x in through or x in span.bounds or x in inputs]
        ways = [[x] if x in span.bounds else [x, *through.get(x, ())] for x in data]
        if ways:
            common = [x for x in ways[0] if all(x in way for way in ways)]
            through |= {number: common for number in node.outs if number not in span.bounds}
    return through


def _rows_to(span: Span, through: dict[int, list[int]], node: Node) -> list[Chain]:
    """The rows that end with an operation."""
    out = span.tape.values[node.outs[0]] if node.outs[0] >= 0 else None
    if out is None or node.name in VIEWS or not (out.is_floating_point() or out.is_complex()):
        return []
    values = span.tape.values
    starts = [i for i in through.get(node.outs[0], ()) if values[i].shape == out.shape]
    starts = [i for i in starts if values[i].dtype == out.dtype]
    chains = (Chain(span.tape, _inner(span, i, node), i) for i in starts[:NEAREST] + starts[-1:])
    return [chain for chain in chains if _counted(chain) > 1]


def _counted(chain: Chain) -> int:
    return sum(node.name not in VIEWS for node in chain.nodes)


def _inner(span: Span, start: int, last: Node) -> list[Node]:
    """The operations of the span that lead from a value to an operation."""
    reached, forward = {start}, []
    for node in span.nodes:
        if node.number <= last.number and reached & {*node.operands}:
            reached |= {*node.outs}
            forward.append(node)
    needed, kept = {*last.outs}, []
    for node in reversed(forward):
        if needed & {*node.outs}:
            needed |= {*node.operands}
            kept.append(node)
    return kept[::-1]


def _changed(span: Span, rows: Sequence[Chain]) -> Iterator[tuple[str, dict[int, Change]]]:
    """The changes of a row, and alike of the rows that end on the same line."""
    one = rows[0]
    text = _name(span, one)
    yield f"{text} left out", {row.last.number: instead(row, lambda x: x) for row in rows}
    yield f"{text} applied twice", {row.last.number: _twice(row) for row in rows}
    yield from _after_others(span, one, text)
    fixed = {v for k, v in span.tape.marks.items() if k.startswith(PARAMETER)}
    if fixed & {*one.others}:
        return
    for name, function in functions().items():
        changes = {row.last.number: instead(row, function) for row in rows}
        yield f"{name} in the place of {text}: another activation", changes


def _name(span: Span, row: Chain) -> str:
    """A row of operations in words."""
    kinds = {node.name for node in row.nodes if node.name not in VIEWS}
    if "tanh" in kinds and kinds <= {"tanh", "mul", "div"}:
        return "the softcap"
    start = span.operation(row.last).called(row.start)
    return f"what leads from {start} to {described(row.last)}"


def _after_others(span: Span, row: Chain, text: str) -> Iterator[tuple[str, dict[int, Change]]]:
    """A row of operations after those that follow it, or done again there."""
    end = row.last.outs[0]
    reached, later = {end}, []
    for node in span.nodes:
        if reached & {*node.operands}:
            reached |= {*node.outs}
            fits = not node.several and span.shape(node.outs[0]) == span.shape(end)
            later += [node] if fits and node.name not in VIEWS else []
    for node in later[:NEXT]:
        rest = Chain(span.tape, _inner(span, end, node), end)
        where = f"after {described(node)}"
        yield f"{text} {where}, torch before it", {node.number: _behind(row, rest)}
        if len(row.nodes) > 1:
            yield f"{text} done again {where}", {node.number: _repeated(row)}


def _behind(row: Chain, rest: Chain) -> Change:
    def change(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
        return row.applied(rest.applied(more[row.start], more), more)

    return Change(change, more=(row.start, *row.others, *rest.others))


def _repeated(row: Chain) -> Change:
    def change(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
        return row.applied(func(*args, **kwargs), more)

    return Change(change, more=row.others)


def instead(row: Chain, function: Any) -> Change:
    """A function of the value that enters a row, in the place of the row."""

    def change(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
        return _as_first(row, func, args, kwargs, function(more[row.start]))

    return Change(change, more=(row.start,))


def _twice(row: Chain) -> Change:
    def change(func: Any, args: Any, kwargs: Any, more: Any) -> Any:
        out = func(*args, **kwargs)
        second = row.applied(first(out), more)
        return type(out)((second, *out[1:])) if row.last.several else second

    return Change(change, more=row.others)


def _as_first(row: Chain, func: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """A value as the first result of the row's last operation."""
    if not row.last.several:
        return made
    return (made, *func(*args, **kwargs)[1:])
