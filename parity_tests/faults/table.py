"""The table of listed faults in docs/trial.md: of each list how many are found, placed, named."""

from collections.abc import Sequence
from pathlib import Path

from flax_attn._internal.markdown import fill, table, text_between

from .judge import QUESTIONS, Answer

PAGE = Path(__file__).parents[2] / "docs" / "trial.md"
MARKS = text_between("<!-- listed -->", "<!-- end of listed -->")
HEADINGS = ("list", *QUESTIONS, "innocent blamed", "misled")
MISTAKES_PAGE = PAGE.with_name("mistakes.md")
MISTAKES = text_between("<!-- mistakes -->", "<!-- end of mistakes -->")


def share(answers: Sequence[Answer], question: str) -> tuple[int, int]:
    """How many are right, of those asked."""
    asked = [right for answer in answers if (right := answer.of(question)) is not None]
    return sum(asked), len(asked)


def text(answers: Sequence[Answer]) -> str:
    """A row for each list, and one for all."""
    groups = dict.fromkeys(answer.fault.group for answer in answers)
    rows = [row(name, [x for x in answers if x.fault.group == name]) for name in groups]
    return table(HEADINGS, [*rows, row("**all**", answers)])


def row(name: str, answers: Sequence[Answer]) -> list[str]:
    """How many are found, placed and named of those asked; who is blamed or misled besides."""
    counts = ["{}/{}".format(*share(answers, question)) for question in QUESTIONS]
    harm = (sum(bool(x.innocent) for x in answers), sum(bool(x.misleads) for x in answers))
    return [name, *counts, *map(str, harm)]


def mistakes(answers: Sequence[Answer]) -> str:
    """Of each mistake in a published block its place and what it was said to look like."""
    rows = []
    for answer in answers:
        place, _, looks = answer.said.partition(", ")
        said = f"({looks})" if answer.named is False else looks
        parts = (answer.fault.port, answer.fault.name, place, said)
        rows.append([" ".join(part.replace("|", "/").split()) for part in parts])
    return table(("block", "mistake", "where the report says it is", "it looks like"), rows)


def write(answers: Sequence[Answer]) -> None:
    """Puts the table into docs/trial.md, and that of published blocks into docs/mistakes.md."""
    blocks = [answer for answer in answers if answer.fault.group == "published blocks"]
    for page, marks, made in (
        (PAGE, MARKS, text(answers)),
        (MISTAKES_PAGE, MISTAKES, mistakes(blocks)),
    ):
        page.write_text(fill(page.read_text("utf-8"), marks, made), "utf-8")
