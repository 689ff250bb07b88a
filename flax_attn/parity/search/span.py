"""The part of torch's program between values that agree and one that differs."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report import plural
from ..sides.tape import INPUT, Node, Tape
from .operation import VIEWS, Operation, sources
from .replay import Change, Changes, Replay, ancestors, evaluated
from .sites import subsets
from .target import Target

SECONDS = 24.0  # of CPU time, which all searches of one comparison may take together


class Budget:
    """The CPU time that is left for all searches of one comparison.

    Attributes:
      seconds: what they have taken so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.thread_time()

    def start(self) -> None:
        """Begins to count."""
        self._since = time.thread_time()

    def stop(self) -> None:
        """Ends counting; what came between two searches is not counted."""
        self.seconds += time.thread_time() - self._since

    @property
    def spent(self) -> bool:
        """Whether the running search must stop."""
        return self.seconds + time.thread_time() - self._since > SECONDS


@dataclass(frozen=True)
class Cause:
    """A change of torch's program that gives Flax's value.

    Attributes:
      sentence: what it is, in words.
      changes: by number of the operation.
      fitted: whether a constant of it was fitted to Flax's value.
    """

    sentence: str
    changes: Changes
    fitted: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Only the sentence is pickled: changes hold functions."""
        return {"sentence": self.sentence, "changes": {}, "fitted": self.fitted}


@dataclass(frozen=True)
class Outcome:
    """What a search gave.

    Attributes:
      cause: the change that explains the value; None if none does.
      tried: number of changes that were evaluated.
      operations: number of operations in the span.
      seconds: of CPU time that all searches of the comparison have taken.
      stopped: whether time ran out before everything was tried.
    """

    cause: Cause | None
    tried: int
    operations: int
    seconds: float
    stopped: bool

    def __str__(self) -> str:
        """How much was tried in vain, and for how long."""
        if not self.tried:
            return "torch computes nothing there that could be changed"
        of = f" of {plural(self.operations, 'operation')}" if self.operations else ""
        taken = f"{math.ceil(self.seconds)} s of CPU time"
        stop = f"stopped after {taken}" if self.stopped else f"in {taken}: none explains it"
        return f"{plural(self.tried, 'change')}{of} tried, {stop}"


@dataclass
class Span:
    """A span, evaluated from recorded values.

    Attributes:
      tape: torch's recorded program.
      target: the value that differs.
      bounds: numbers of values that agree, which stay as recorded.
      labels: names of values by number.
      budget: the time that is left.
      tried: number of evaluations.
    """

    tape: Tape
    target: Target
    bounds: frozenset[int]
    labels: Mapping[int, str]
    budget: Budget
    tried: int = 0

    def __post_init__(self) -> None:
        self.nodes = ancestors(self.tape, [self.target.number], self.bounds)
        self.computing = [node for node in self.nodes if node.name not in VIEWS]
        self.sites = [*subsets(self.nodes, self.labels)]
        made = {number for node in self.nodes for number in node.outs}
        used = {number for node in self.nodes for number in node.operands}
        self.entering = frozenset(used - made) | (self.bounds & used)
        uses = Counter(number for node in self.nodes for number in {*node.operands})
        self.shared = frozenset(number for number, count in uses.items() if count > 1)
        self.after: dict[int, list[Node]] = {}

    def operation(self, node: Node) -> Operation:
        """An operation as the catalogue looks at it."""
        return Operation(node, self.tape, self.labels, self.entering, self.shared)

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return tuple(self.tape.values[value].shape)

    def is_parameter(self, value: int) -> bool:
        """Whether a value is a parameter or a buffer, perhaps laid out otherwise."""
        *_, first = sources(self.tape, value)
        return not self.tape.names.get(first, INPUT).startswith(INPUT)

    def explains(self, changes: Changes) -> bool:
        """Whether the program with these changes gives Flax's value."""
        made = self.evaluate(changes)
        return made is not None and self.target.equals(made)

    def evaluate(self, changes: Changes) -> Any:
        """The target's value with some changes; None if it fails with them, or time is up."""
        if self.budget.spent:
            return None
        self.tried += 1
        if len(changes) > 1 and any(self._looks_ahead(n, x) for n, x in changes.items()):
            return self._replayed(changes)
        made: dict[int, Any] = {}

        def get(number: int) -> Any:
            return made[number] if number in made else self.tape.values[number]

        try:
            for node in self._affected(changes):
                made |= evaluated(node, changes.get(node.number), get)
        except Exception:  # a change may give shapes that do not fit
            return None
        return made.get(self.target.number)

    def _looks_ahead(self, number: int, change: Change) -> bool:
        """Whether a change needs a value that is computed after its operation."""
        values = (*change.operands.values(), *(change.more or ()))
        return any(self.tape.producers[value] > number for value in values)

    def _replayed(self, changes: Changes) -> Any:
        try:
            return Replay(self.tape, changes, bounds=self.bounds).value(self.target.number)
        except Exception:
            return None

    def _affected(self, changes: Changes) -> Sequence[Node]:
        """The changed operations and all behind them, in order."""
        lists = [self._behind(number) for number in changes]
        if len(lists) == 1:
            return lists[0]
        numbers = sorted({node.number for nodes in lists for node in nodes})
        return [self.tape.nodes[i] for i in numbers]

    def _behind(self, number: int) -> list[Node]:
        if number not in self.after:
            reached, nodes = set(self.tape.nodes[number].outs), [self.tape.nodes[number]]
            for node in self.nodes:
                if node.number > number and reached & {*node.operands}:
                    reached |= {*node.outs} - self.bounds
                    nodes.append(node)
            self.after[number] = nodes
        return self.after[number]
