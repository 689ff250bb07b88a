"""`make_plan`: maps torch tensors to Flax Params, or reports all problems in one error."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flax import nnx

from ..errors import ParityError
from .described import Source
from .known_layers import flax_params, flax_state
from .mapping import Draft
from .move import Move, Stack
from .rule import Rule
from .suggest import ALTERNATIVES, by_order, propose, unknown_gates

HEADER = "The torch module does not fit the Flax module:"
MAX_LINES = 20  # of a refusal
OTHER_TREE = (
    "Weights are carried between two nnx modules with the same tree only, and these differ "
    '(weights="as_is" compares each with its own):'
)


@dataclass(frozen=True)
class Plan:
    """The complete mapping of a torch module to a Flax module.

    Attributes:
      moves: the tensors to copy.
      constants: buffers that Flax computes itself; they are not copied.
      skipped: tensors excluded by `Rule.skip`.
      tied: further torch names of tensors that are copied once.

    >>> Plan((), ("mask",), (), ()).constants
    ('mask',)
    """

    moves: tuple[Move | Stack, ...]
    constants: tuple[str, ...]
    skipped: tuple[str, ...]
    tied: tuple[str, ...]

    def forward(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts torch's arrays by name to Flax's by path; works for subsets, as of gradients."""
        moves = [move for move in self.moves if not values.keys().isdisjoint(move.sources)]
        return {k: v for move in moves for k, v in move.forward(values).items()}

    def back(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts Flax's arrays by path to torch's by name; works for subsets."""
        moves = [move for move in self.moves if not values.keys().isdisjoint(move.targets)]
        return {k: v for move in moves for k, v in move.back(values).items()}

    def __str__(self) -> str:
        lines = [
            f"{_source_names(m)} -> {', '.join(m.targets)}" + (f"  {m.layout}" if m.layout else "")
            for m in self.moves
        ]
        lines += [f"{name}: constant, not carried" for name in self.constants]
        lines += [f"{name}: skipped by rule" for name in self.skipped]
        return "\n".join(lines + [f"{name}: tied, carried once" for name in self.tied])


def _source_names(move: Move | Stack) -> str:
    """Returns torch's names; for stacked layers, those of the first and the last."""
    if isinstance(move, Stack) and len(move.layers) > 2:
        first, last = (", ".join(layer.sources) for layer in (move.layers[0], move.layers[-1]))
        return f"{first} ... {last}"
    return ", ".join(move.sources)


def make_plan(
    sources: Sequence[Source],
    module: nnx.Module,
    rules: Sequence[Rule] = (),
    parts: Sequence[str] | None = None,
) -> Plan:
    """Maps described torch tensors to a Flax module.

    Args:
      parts: paths of all torch submodules, including those without tensors, if known.

    Raises:
      ParityError: lists every problem: tensors without a target, Params that no tensor fills or
        that are filled twice, different shapes, rules that match nothing, ties on one side only.
        It also lists proposed rules.
    """
    draft = Draft(sources, module, rules, parts=parts)
    if draft.problems:
        raise _refusal(draft)
    return Plan(tuple(draft.moves), draft.constants, tuple(draft.skipped), tuple(draft.tied))


def same_tree(sources: Sequence[Source], module: nnx.Module) -> Plan:
    """Maps the weights of one nnx module, described, to those of another with the same tree.

    Raises:
      ParityError: lists every path that only one has, or has in another shape or tied otherwise.
    """
    state = {path: np.shape(x.get_value()) for path, x in flax_state(module).items()}
    shapes, ties = {source.name: source.shape for source in sources}, first_paths(module)
    problems = [f"{path} is only in the first" for path in shapes if path not in state]
    problems += [f"{path} is only in the second" for path in state if path not in shapes]
    for source in sources:
        path, shape = source.name, state.get(source.name, source.shape)
        if shape != source.shape:
            problems.append(f"{path} is {[*source.shape]} in the first, {[*shape]} in the second")
        elif ties.get(path, path) != (source.same_as or path):
            problems.append(f"{path} is shared with another weight on one side only")
    if problems:
        lines = [f"  - {problem}" for problem in problems]
        raise ParityError("\n".join([OTHER_TREE, *lines[:MAX_LINES]]), full="\n".join(lines))
    moves = tuple(Move((s.name,), (s.name,)) for s in sources if not s.same_as)
    return Plan(moves, (), (), tuple(s.name for s in sources if s.same_as))


def first_paths(module: nnx.Module) -> dict[str, str]:
    """Maps every Param path to the first path of the same Param."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(param), path) for path, param in flax_params(module).items()}


def _refusal(draft: Draft) -> ParityError:
    """The error that lists all problems and proposed rules; a long one shows the rules first."""
    problems, proposed = [f"  - {problem}" for problem in draft.problems], propose(draft)
    rules = ["you may mean:"] * bool(proposed) + [f"  {rule}" for rule in proposed]
    if unsure := by_order(draft, proposed):
        rules.append(
            f"{' and '.join(unsure)} fit either way, and no name tells: the rules follow the "
            "order in which both sides define their layers; check which is called first."
        )
    rules += unknown_gates(draft, proposed)
    if len({rule.names for rule in proposed}) < len(proposed):
        rules = [f"{ALTERNATIVES}.", *rules]
    full = "\n".join([HEADER, *problems, *rules])
    if 1 + len(problems) + len(rules) <= MAX_LINES:
        return ParityError(full)
    shown = max(MAX_LINES - len(rules) - 2, 1)
    rest = f"  and {len(problems) - shown} problems more: the error's `full` has all"
    return ParityError("\n".join([HEADER, *rules, *problems[:shown], rest]), full=full)
