"""Evaluates an attention's logits and weights at any queries and keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from .heads import Heads, heads_of
from .program import Program
from .roles import Roles, Unclear

Leaves = dict[int, Any]  # tensors by number of the value that they replace
NAN = float("nan")


@dataclass(frozen=True)
class Attention:
    """The softmax attention of a recorded program.

    Attributes:
      program: the program.
      roles, heads: its roles and heads.
      neutral: inputs that only hide keys or add to the logits, replaced by ones that do not.
    """

    program: Program
    roles: Roles
    heads: Heads
    neutral: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, roles: Roles) -> "Attention":
        return cls(program, roles, heads_of(roles))

    def put(self, role: str, values: np.ndarray, leaves: Leaves | None = None) -> Leaves:
        """Leaves with other heads of a role.

        Args:
          role: "query", "key", "value" or "gate".
          values: what broadcasts to `batch token head component`.
          leaves: replaced before.
        """
        import torch

        leaves, heads = dict(leaves or {}), getattr(self.heads, role)
        batch, tokens, width = heads[0].places.shape
        if any(head.places.shape != (batch, tokens, width) for head in heads):
            raise Unclear(f"heads of the {role} with different numbers of components")
        wanted = np.broadcast_to(values, (batch, tokens, len(heads), width))
        for n, head in enumerate(heads):
            number = head.projection.value
            if number not in leaves:
                leaves[number] = self.program.tape.values[number].contiguous().clone()
            else:
                leaves[number] = leaves[number].clone()
            flat = torch.from_numpy(np.ascontiguousarray(wanted[:, :, n]).ravel())
            leaves[number].view(-1)[torch.from_numpy(head.places.ravel())] = flat
        return leaves

    def named(self, values: Mapping[str, np.ndarray]) -> Leaves:
        """Leaves with other parameters."""
        import torch

        tape = self.program.tape
        return {
            number: torch.from_numpy(np.asarray(values[name], np.float64)).reshape(
                tape.values[number].shape
            )
            for number, name in tape.names.items()
            if name in values and tape.producers[number] < 0
        }

    def table(self, number: int, softmax: int, leaves: Leaves) -> np.ndarray:
        """A value in the shape of the weights of a softmax, evaluated from leaves."""
        made = self.program.values({**self.neutral, **leaves}, number).detach().numpy()
        shape = self.roles.grids[softmax].shape
        if made.size != int(np.prod(shape)):
            raise Unclear("a step before the softmax has another shape than the weights")
        return made.reshape(shape)

    def by_head(self, numbers: Sequence[int], leaves: Leaves) -> np.ndarray:
        """Values in the shape of the weights, one for each softmax, as `batch head query key`."""
        tables = [self.table(x, i, leaves) for i, x in enumerate(numbers)]
        queries, keys = self.roles.queries, self.roles.keys
        made = np.empty((self.roles.batch, len(self.heads.query), queries, keys))
        for (b, n), (softmax, lead) in self.heads.softmax.items():
            grid = self.roles.grids[softmax]
            index: list[Any] = [slice(None)] * len(grid.shape)
            rest = iter(lead)
            for axis in range(len(grid.shape)):
                if axis == grid.key:
                    index[axis] = slice(grid.first, grid.first + keys)
                elif axis != grid.query:
                    index[axis] = next(rest)
            part = tables[softmax][tuple(index)]
            made[b, n] = part if grid.query < grid.key else part.T
        return made

    def weights(self, leaves: Leaves) -> np.ndarray:
        return self.by_head([weights for _, weights in self.program.softmaxes], leaves)

    def scores(self, leaves: Leaves) -> np.ndarray:
        """The input of the softmax; NaN where it is hidden."""
        made = self.by_head([scores for scores, _ in self.program.softmaxes], leaves)
        return np.where(self.visible, made, NAN)

    @cached_property
    def visible(self) -> np.ndarray:
        """Which keys each query of each head attends to: `batch head query key`."""
        zero = self.put("key", np.zeros(1), self.put("query", np.zeros(1)))
        made = self.weights(zero)
        return (made > 0) if np.isfinite(made).all() else self.weights({}) > 0

    @cached_property
    def path(self) -> dict[str, tuple[str, ...]]:
        """Parameters between the queries and the softmax, and between the keys and it."""
        return {role: self._parameters(role) for role in ("query", "key")}

    def _parameters(self, role: str) -> tuple[str, ...]:
        """Parameters of the operations on values that depend on the heads of this role."""
        program, heads = self.program, getattr(self.heads, role)
        random = np.random.RandomState(7).standard_normal((len(heads), self.roles.head_dim))
        scores = [pair[0] for pair in program.softmaxes]
        changed = program.changed(self.put(role, random), scores) - {*scores}
        names: dict[str, None] = {}
        for node in program.tape.nodes:
            if changed & {*node.operands}:
                fixed = [x for x in node.operands if x not in program.moving]
                names |= dict.fromkeys(name for x in fixed for name in program.names_of(x))
        return tuple(names)
