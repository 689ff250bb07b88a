"""docs/mistakes.md, its table written by the trial: `... faults.ported --write`."""

from collections.abc import Sequence
from pathlib import Path

from flax_attn._internal.markdown import fill, table, text_between

from .table import Row

PAGE = Path(__file__).parents[5] / "docs" / "mistakes.md"
MARKS = text_between("<!-- mistakes -->", "<!-- end of mistakes -->")
HEADINGS = ("block", "mistake", "where the report says it is", "it looks like")


def listed(rows: Sequence[Row]) -> str:
    """The table: of each mistake where it was placed and what it was said to look like."""
    lines = []
    for row in rows:
        place, _, looks = row.said.partition(", ")
        cell = looks if row.named or row.named is None else f"({looks})"
        parts = (row.fault.block.name, row.fault.name, place, cell)
        lines.append([" ".join(part.replace("|", "/").split()) for part in parts])
    return table(HEADINGS, lines)


def write(rows: Sequence[Row]) -> None:
    """Puts the table into the page."""
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, listed(rows)), "utf-8")
