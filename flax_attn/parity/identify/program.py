"""A module's recorded program: its projections, and the softmax that they lead to."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..search.replay import Replay, span
from ..sides.match import point_of, sibling
from ..sides.run import Run
from ..sides.tape import INPUT, OUTPUT, Node, Ref, Tape, flat

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv")


@dataclass(frozen=True)
class Projection:
    """A product of a value that depends on the inputs with one that does not.

    Attributes:
      node: the operation.
      parameters: names of the parameters that it multiplies and adds, as far as they have names.
    """

    node: Node
    parameters: tuple[str, ...]

    @property
    def value(self) -> int:
        """The number of its result."""
        return self.node.outs[0]


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
        inputs = [v for k, v in self.tape.marks.items() if k.startswith(INPUT)]
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
                fixed = [x for x in node.operands if x not in self.moving]
                names = dict.fromkeys(name for x in fixed for name in self._names(x))
                made.append(Projection(node, tuple(names)))
        return made

    def _factors(self, node: Node) -> list[int]:
        """The two factors of a product; of other operations none."""
        if node.name not in PRODUCTS:
            return []
        refs = [x.value for x in flat(node.args) if isinstance(x, Ref)]
        added = node.name.startswith(("addm", "baddbmm"))
        return refs[1:3] if added else refs[:2]

    def _names(self, value: int) -> list[str]:
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
        return [(self._on_path(sibling(x, "scores")), self._on_path(x)) for x in taps]

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
        return Replay(self.tape, {}, leaves, whole=True).value(wanted)

    def array(self, value: int) -> np.ndarray:
        return self.tape.values[value].numpy()
