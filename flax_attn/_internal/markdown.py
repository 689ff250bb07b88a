"""Markdown tables, and pages with generated parts between two marks."""

import re
from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table.

    >>> table(["layer", "verdict"], [["A", "equal"]])
    '| layer | verdict |\\n| --- | --- |\\n| A | equal |\\n'
    """
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def cells(text: str) -> list[list[str]]:
    """Parses a table to rows of cells, the headings first.

    >>> cells("| layer | verdict |\\n| --- | --- |\\n| A | equal |\\n")
    [['layer', 'verdict'], ['A', 'equal']]
    """
    rows = [line.strip("| ").split(" | ") for line in text.splitlines()]
    return [*rows[:1], *rows[2:]]


def text_between(first: str, last: str) -> re.Pattern[str]:
    """Pattern of the text between two marks (regular expressions), as the group "table"."""
    return re.compile(rf"{first}\n(?P<table>.*?){last}", re.DOTALL)


def fill(page: str, marks: re.Pattern[str], text: str) -> str:
    """Replaces the text between the marks; raises ValueError if the page lacks them.

    >>> fill("<!-- a -->\\nold\\n<!-- b -->", text_between("<!-- a -->", "<!-- b -->"), "new\\n")
    '<!-- a -->\\nnew\\n<!-- b -->'
    """
    match = marks.search(page)
    if match is None:
        place = marks.pattern.replace(r"\n(?P<table>.*?)", " ... ")
        raise ValueError(f"The page has no place for it: {place}.")
    return page[: match.start("table")] + text + page[match.end("table") :]
