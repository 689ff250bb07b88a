"""What both trials count: of each group how many outcomes answer each question with yes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flax_attn._internal.markdown import table


class Answer(Protocol):
    """One fault, at full size or at low amplitude, and what was said of it."""

    @property
    def fault(self) -> Any: ...

    @property
    def low(self) -> bool: ...

    def of(self, question: str) -> bool | None: ...


def share(found: Iterable[Answer], question: str) -> tuple[int, int]:
    """How many of those asked."""
    answers = [answer for row in found if (answer := row.of(question)) is not None]
    return sum(answers), len(answers)


@dataclass(frozen=True)
class Tally:
    """How a trial's outcomes are counted.

    Attributes:
      title: of the table.
      groups: of the faults, in their order.
      questions: that each outcome answers.
      expected: what should have been said of a fault.
    """

    title: str
    groups: Sequence[str]
    questions: Sequence[str]
    expected: Callable[[Any], str]

    def text(self, found: Sequence[Answer]) -> str:
        """The table as text, each amplitude by itself, and a line for each fault missed."""
        lows = sorted({row.low for row in found})
        asked = [(low, question) for low in lows for question in self.questions]
        heads = [f"{question} {'low' if low else 'full'}" for low, question in asked]
        wide = max(map(len, (self.title, *self.groups))) + 2
        lines = [f"{self.title:<{wide}}" + "".join(f"{head:>15}" for head in heads)]
        for group in (*self.groups, "all"):
            mine = _of(found, group)
            cells = [_cell([row for row in mine if row.low is low], q) for low, q in asked]
            lines.append(f"{group:<{wide}}" + "".join(f"{cell:>15}" for cell in cells))
        return "\n".join([*lines, "", *self.missed(found)])

    def markdown(self, found: Sequence[Answer]) -> str:
        """The table for a page: groups across, both amplitudes together."""
        every = (*self.groups, "all")
        rows = [[q, *(_cell(_of(found, group), q) for group in every)] for q in self.questions]
        return table(["", *every], rows).rstrip("\n")

    def missed(self, found: Iterable[Answer]) -> list[str]:
        """A line for each outcome in which some answer is no."""
        return [
            f"{', '.join(wrong)}: {row}, expected {self.expected(row.fault)}"
            for row in found
            if (wrong := [f"not {q}" for q in self.questions if row.of(q) is False])
        ]


def _of(found: Iterable[Answer], group: str) -> list[Answer]:
    return [row for row in found if group in (row.fault.group, "all")]


def _cell(found: Iterable[Answer], question: str) -> str:
    right, asked = share(found, question)
    return f"{right}/{asked}" if asked else "-"
