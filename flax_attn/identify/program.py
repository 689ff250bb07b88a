"""A module's recorded program: its projections, and the softmax that they lead to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..parity.search.replay import Replay, in_float64, span
from ..parity.sides.match import point_of, sibling
from ..parity.sides.run import Run
from ..parity.sides.tape import INPUT, OUTPUT, Node, Ref, Tape, flat

# Operations that only move numbers.
MOVES = (
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "squeeze", "unsqueeze"),
    *("clone", "expand", "as_strided", "detach", "alias", "_to_copy", "contiguous"),
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv")


@dataclass(frozen=True)
class Projection:
    """A product of a value that depends on the inputs with one that does not.

    Attributes:
      node: the operation.
      operand: number of the value that depends on the inputs.
      value: number of its result, with the bias if one is added to all of it.
      parameters: names of the parameters that it multiplies and adds, as far as they have names.
    """

    node: Node
    operand: int
    value: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A recorded run with its program.

    Attributes:
      run: the values of taps.
      tape: the operations.
    """

    run: Run
    tape: Tape

    def behind(self, *values: int) -> list[Node]:
        """The operations that depend on any of these values, in order."""
        reached, nodes = {*values}, []
        for node in self.tape.nodes:
            if reached & {*node.operands}:
                reached |= {*node.outs}
                nodes.append(node)
        return nodes

    @cached_property
    def moving(self) -> frozenset[int]:
        """Numbers of the values that depend on an input."""
        inputs = self.inputs
        return frozenset([*inputs, *(x for node in self.behind(*inputs) for x in node.outs)])

    @cached_property
    def outputs(self) -> list[int]:
        """Numbers of the module's outputs."""
        return [v for k, v in self.tape.marks.items() if k.startswith(OUTPUT)]

    @cached_property
    def projections(self) -> list[Projection]:
        """All projections, in order."""
        made = []
        for node in self.tape.nodes:
            factors = self._factors(node)
            if len({x in self.moving for x in factors}) == 2:
                operand = next(x for x in factors if x in self.moving)
                value, bias = self._with_bias(node.outs[0])
                fixed = [*(x for x in node.operands if x not in self.moving), *bias]
                names = dict.fromkeys(name for x in fixed for name in self.names_of(x))
                made.append(Projection(node, operand, value, tuple(names)))
        return made

    def _with_bias(self, value: int) -> tuple[int, list[int]]:
        """The number of a product with its bias, and that of the bias."""
        at = value
        while True:
            users = self.users.get(at, [])
            if len(users) != 1:
                return value, []
            node = users[0]
            if node.name == "add":
                fixed = [x for x in node.operands if x not in self.moving]
                return (node.outs[0], fixed) if fixed and self.names_of(fixed[0]) else (value, [])
            if node.name not in MOVES:
                return value, []
            at = node.outs[0]

    def source(self, value: int) -> int | None:
        """The input whose numbers a value has, in another order; None if it is computed."""
        first = self._before_moves(value)
        return first if first in self.inputs else None

    def computed(self, value: int) -> Node:
        """The operation that computes a value, before its numbers are moved."""
        return self.tape.nodes[self.tape.producers[self._before_moves(value)]]

    def _before_moves(self, value: int) -> int:
        while self.tape.producers[value] >= 0:
            node = self.tape.nodes[self.tape.producers[value]]
            if node.name not in MOVES:
                break
            value = node.operands[0]
        return value

    @cached_property
    def inputs(self) -> list[int]:
        """Numbers of the module's inputs."""
        return [v for name, v in self.tape.marks.items() if name.startswith(INPUT)]

    @cached_property
    def users(self) -> dict[int, list[Node]]:
        """The operations that take each value."""
        users: dict[int, list[Node]] = {}
        for node in self.tape.nodes:
            for x in dict.fromkeys(node.operands):
                users.setdefault(x, []).append(node)
        return users

    def _factors(self, node: Node) -> list[int]:
        """The two factors of a product; of other operations none."""
        if node.name not in PRODUCTS:
            return []
        refs = [x.value for x in flat(node.args) if isinstance(x, Ref)]
        added = node.name.startswith(("addm", "baddbmm"))
        return refs[1:3] if added else refs[:2]

    def names_of(self, value: int) -> list[str]:
        """The parameters that a value is computed from."""
        left, seen, names = [value], set(), []
        while left:
            one = left.pop()
            if one in seen:
                continue
            seen.add(one)
            producer = self.tape.producers[one]
            if one in self.tape.names:
                names.append(self.tape.names[one])
            elif producer >= 0:
                left += self.tape.nodes[producer].operands
        return names

    @cached_property
    def softmaxes(self) -> list[tuple[int, int]]:
        """Numbers of the scores and the weights of every softmax."""
        taps = [name for name in self.run.taps if point_of(name) == "weights"]
        pairs = [(self._on_path(sibling(x, "scores")), self._on_path(x)) for x in taps]
        return [(self._unshifted(scores), weights) for scores, weights in pairs]

    def _unshifted(self, scores: int) -> int:
        """The logits before each row's largest is subtracted, which no softmax sees."""
        producer = self.tape.producers[scores] if scores >= 0 else -1
        if producer < 0 or self.tape.nodes[producer].name != "sub":
            return scores
        before, *others = self.tape.nodes[producer].operands
        for other in others:
            largest = self.tape.nodes[self.tape.producers[self._before_moves(other)]]
            if largest.name in ("amax", "max") and largest.operands[0] == before:
                return before
        return scores

    def _on_path(self, tap: str) -> int:
        """The number of the value on the way to an output that a tap shows; -1 if none is.

        A tap may be a copy of it, or have its axes of batch and heads apart.
        """
        if tap not in self.run.taps:
            return -1
        want = self.run.taps[tap]
        for number in sorted(self._leading):
            x = self.tape.values[number]
            if x.numel() == want.size and np.array_equal(x.numpy().ravel(), want.ravel()):
                return number
        return -1

    @cached_property
    def _leading(self) -> frozenset[int]:
        """Numbers of the values that depend on an input and lead to an output."""
        nodes = span(self.tape, self.outputs, frozenset())
        needed = {x for node in nodes for x in (*node.operands, *node.outs)}
        return frozenset(needed & self.moving)

    def values(self, leaves: Mapping[int, Any], wanted: int) -> Any:
        """A value of the program, evaluated again from these leaves with gradients."""
        return self._evaluated(leaves, [wanted])[wanted]

    def changed(self, leaves: Mapping[int, Any], wanted: Sequence[int]) -> set[int]:
        """Numbers of the values on the way to some that are others with these leaves."""
        made, before = self._evaluated(leaves, wanted), self.tape.values
        return {
            x
            for x, value in made.items()
            if value.shape != before[x].shape or not bool((value == before[x]).all())
        }

    def _evaluated(self, leaves: Mapping[int, Any], wanted: Sequence[int]) -> dict[int, Any]:
        behind = {x for node in self.behind(*leaves) for x in node.outs}
        fixed = frozenset(range(len(self.tape.values))) - behind - {*leaves}
        replay = Replay(self.tape, {}, leaves, whole=True, bounds=fixed)
        with in_float64():
            values = {x: replay.value(x) for x in wanted}
        return {**replay.made, **values}

    def array(self, value: int) -> np.ndarray:
        return self.tape.values[value].numpy()
