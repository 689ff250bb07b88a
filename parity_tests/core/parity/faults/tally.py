"""What both trials count: of each group how many outcomes answer each question with yes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from flax_attn._markdown import table


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


def text(
    found: Sequence[Answer],
    title: str,
    groups: Sequence[str],
    questions: Sequence[str],
    expected: Callable[[Any], str],
) -> str:
    """The table as text, each amplitude by itself, and a line for each fault that was missed."""
    asked = [(low, question) for low in (False, True) for question in questions]
    heads = [f"{question} {'low' if low else 'full'}" for low, question in asked]
    lines = [f"{title:<22}" + "".join(f"{head:>15}" for head in heads)]
    for group in (*groups, "all"):
        mine = _of(found, group)
        cells = [_cell([row for row in mine if row.low is low], q) for low, q in asked]
        lines.append(f"{group:<22}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join([*lines, "", *missed(found, questions, expected)])


def markdown(found: Sequence[Answer], groups: Sequence[str], questions: Sequence[str]) -> str:
    """The table for a page: groups across, both amplitudes together."""
    every = (*groups, "all")
    rows = [[q, *(_cell(_of(found, group), q) for group in every)] for q in questions]
    return table(["", *every], rows).rstrip("\n")


def missed(
    found: Iterable[Answer], questions: Sequence[str], expected: Callable[[Any], str]
) -> list[str]:
    """A line for each outcome in which some answer is no."""
    return [
        f"{', '.join(wrong)}: {row}, expected {expected(row.fault)}"
        for row in found
        if (wrong := [f"not {q}" for q in questions if row.of(q) is False])
    ]


def _of(found: Iterable[Answer], group: str) -> list[Answer]:
    return [row for row in found if group in (row.fault.group, "all")]


def _cell(found: Iterable[Answer], question: str) -> str:
    right, asked = share(found, question)
    return f"{right}/{asked}" if asked else "-"
