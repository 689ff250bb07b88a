"""Which numbers of which parameters are the matrices and biases of an attention's roles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..parity.sides.tape import Node, Ref
from .attention import Attention
from .heads import Head
from .program import Projection
from .roles import Sizes, Unclear

# Products without a sum.
PLAIN = ("mm", "bmm", "mv")
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "gate": "g_proj"}


@dataclass(frozen=True)
class Piece:
    """A part of a parameter.

    Attributes:
      name: the parameter's.
      index: flat indices of the part.
    """

    name: str
    index: np.ndarray


@dataclass(frozen=True)
class Matrix:
    """The weights of one role, head by head.

    Attributes:
      weights: for each head `component feature`; for the output `component output`.
      biases: for each head its components; None without; for the output one piece.
    """

    weights: tuple[Piece, ...]
    biases: tuple[Piece, ...] | None


class Matrices:
    """Finds matrices by the values of their elements, which are random and so unlike each other.

    Args:
      attention: of a run with random parameters.
      names: the module's parameters.
    """

    def __init__(self, attention: Attention, names: Sequence[str]):
        self.attention, self.program = attention, attention.program
        tape = self.program.tape
        numbers = {name: x for x, name in tape.names.items() if tape.producers[x] < 0}
        self.shapes = {
            name: tuple(tape.values[numbers[name]].shape) for name in names if name in numbers
        }
        self.arrays = {name: self.program.array(numbers[name]) for name in self.shapes}

    @cached_property
    def known(self) -> dict[float, tuple[str, int]]:
        """Name and flat index of every element of a parameter by its value."""
        return {
            x: (name, i)
            for name, array in self.arrays.items()
            for i, x in enumerate(array.ravel().tolist())
        }

    def piece(self, values: np.ndarray, what: str) -> Piece:
        """The part of a parameter that has these values.

        Raises:
          Unclear: if they are those of no parameter, or of several.
        """
        places = [self.known.get(x) for x in values.ravel().tolist()]
        names = {place[0] for place in places if place is not None}
        if None in places or len(names) != 1:
            raise Unclear(f"{what} is no part of one parameter")
        index = np.array([place[1] for place in places if place is not None])
        return Piece(names.pop(), index.reshape(values.shape))

    def of_role(self, role: str) -> Matrix:
        """Weights and biases of queries, keys, values or a gate."""
        heads: Sequence[Head] = getattr(self.attention.heads, role)
        made = [self._linear(h.projection, h.places[0, 0]) for h in heads]
        what = f"the matrix of a head's {role}"
        weights = tuple(self.piece(w, what) for w, _ in made)
        return Matrix(weights, self._biases([b for _, b in made], role))

    def _biases(self, values: Sequence[np.ndarray], role: str) -> tuple[Piece, ...] | None:
        if not any(x.any() for x in values):
            return None
        return tuple(self.piece(x, f"the bias of a head's {role}") for x in values)

    def _linear(self, projection: Projection, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Matrix `component feature` and bias of some numbers of a projection's result."""
        import torch

        operand = torch.zeros_like(self.program.tape.values[projection.operand])
        operand = operand.contiguous().requires_grad_()
        made = self.program.values({projection.operand: operand}, projection.value).reshape(-1)
        rows = [
            torch.autograd.grad(made[i], operand, retain_graph=True)[0].numpy().ravel()
            for i in places.tolist()
        ]
        matrix = np.stack(rows)
        return matrix[:, matrix.any(0)], made.detach().numpy()[places]

    def of_output(self) -> Matrix:
        """Weights `component output` of each query head in the output projections, and the bias.

        Raises:
          Unclear: without an output projection, or if something mixes the heads before it.
        """
        roles = self.attention.roles
        if not roles.output:
            raise Unclear("no output projection")
        weights: list[Piece] = []
        for head in range(roles.heads):
            projection, places = self._operand_places(head)
            weights.append(self._rows(projection, places))
        values = [self._bias(p) for p in roles.output]
        shown = [x for x in values if x.any()]
        if len(shown) > 1:
            raise Unclear("several biases of the output")
        bias = (self.piece(shown[0], "the bias of the output"),) if shown else None
        return Matrix(tuple(weights), bias)

    def _operand_places(self, head: int) -> tuple[Projection, np.ndarray]:
        """The output projection of a head, and where its operand has the head's components."""
        attention = self.attention
        width = attention.roles.value_dim
        one = self._only(head)
        places = []
        chosen: dict[int, Projection] = {}
        for c in range(width):
            values = np.zeros(width)
            zero = self._operands(attention.put("value", values, one))
            values[c] = 1.0
            made = self._operands(attention.put("value", values, one))
            moved = {n: np.flatnonzero(made[n] != zero[n]) for n in made}
            moved = {n: x for n, x in moved.items() if x.size}
            if len(moved) != 1 or any(x.size != 1 for x in moved.values()):
                raise Unclear("something mixes the heads before the output projection")
            number, place = next(iter(moved.items()))
            chosen[number] = next(p for p in attention.roles.output if p.operand == number)
            places.append(int(place[0]))
        if len(chosen) != 1:
            raise Unclear("a head that goes to several output projections")
        return next(iter(chosen.values())), np.array(places)

    def _only(self, head: int) -> dict[int, Any]:
        """Leaves with one weight of one head that is 1, and all others 0."""
        import torch

        attention, program = self.attention, self.program
        softmax, lead = attention.heads.softmax[0, head]
        grid = attention.roles.grids[softmax]
        leaves = {w: torch.zeros_like(program.tape.values[w]) for _, w in program.softmaxes}
        query, key = (int(x) for x in np.argwhere(attention.visible[0, head])[0])
        weights = program.softmaxes[softmax][1]
        one = torch.zeros(grid.shape, dtype=torch.float64)
        one[grid.index(lead, query, key)] = 1.0
        leaves[weights] = one.reshape(program.tape.values[weights].shape)
        return leaves

    def _operands(self, leaves: Mapping[int, Any]) -> dict[int, np.ndarray]:
        numbers = dict.fromkeys(p.operand for p in self.attention.roles.output)
        return {x: self.program.values(leaves, x).detach().numpy().ravel() for x in numbers}

    def _rows(self, projection: Projection, places: np.ndarray) -> Piece:
        """The weights from some numbers of a projection's operand to its result."""
        import torch

        values, node = self.program.tape.values, projection.node
        zero = torch.zeros_like(values[projection.operand]).contiguous()
        bias = [x for x in node.operands if x not in self.program.moving and self._adds(node, x)]
        without = {x: torch.zeros_like(values[x]) for x in bias}
        rows = []
        for place in places.tolist():
            one = zero.clone()
            one.view(-1)[place] = 1.0
            made = self.program.values({projection.operand: one, **without}, node.outs[0])
            row = made.detach().numpy().ravel()
            rows.append(row[row != 0])
        if len({len(row) for row in rows}) != 1:
            raise Unclear(
                "an output projection that does not reach the same outputs from all heads"
            )
        return self.piece(np.array(rows), "the output's matrix")

    def _adds(self, node: Node, value: int) -> bool:
        """Whether a product adds a value, rather than multiplies it."""
        place = next(i for i, x in enumerate(node.args) if isinstance(x, Ref) and x.value == value)
        return place == (2 if node.name == "convolution" else 0) and node.name not in PLAIN

    def _bias(self, projection: Projection) -> np.ndarray:
        """What a projection adds to the result of every token."""
        import torch

        roles = self.attention.roles
        zero = torch.zeros_like(self.program.tape.values[projection.operand])
        made = self.program.values({projection.operand: zero}, projection.value).detach().numpy()
        if not made.any():
            return np.zeros(1)
        for layout in Sizes(roles.batch, roles.queries, roles.queries).layouts(made.shape):
            rows = made.ravel()[layout]
            if (rows == rows[:1, :1]).all():
                return rows[0, 0]
        raise Unclear("a bias of the output that differs between tokens")
