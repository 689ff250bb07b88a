"""The table of the trial in docs/trial.md: of each block how many faults are placed and named."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax_attn._internal.markdown import fill, table, text_between

PAGE = Path(__file__).parents[4] / "docs" / "trial.md"
MARKS = text_between("<!-- drawn -->", "<!-- end of drawn -->")
QUESTIONS = ("found", "placed", "named", "misled")
HEADINGS = ("block", "faults", *QUESTIONS)


def counted(name: str, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row: the number of faults, and of how many each question is answered by yes."""
    return [name, str(len(answers)), *(str(sum(x[q] for x in answers)) for q in QUESTIONS)]


def text(answers: Sequence[Mapping[str, Any]]) -> str:
    """The table, and a sentence on the time that searches took."""
    usual = [x for x in answers if not x["lacking"]]
    lacking = [x for x in answers if x["lacking"]]
    blocks = dict.fromkeys(x["block"] for x in usual)
    rows = [counted(f"`{b}`", [x for x in usual if x["block"] == b]) for b in blocks]
    rows.append(counted("**all**", usual))
    rows.append(counted("kinds that the catalogue lacks", lacking))
    return f"{table(HEADINGS, rows).rstrip()}\n\n{_seconds(answers)}\n"


def _seconds(answers: Iterable[Mapping[str, Any]]) -> str:
    seconds = [x["seconds"] for x in answers]
    mean, most = sum(seconds) / max(len(seconds), 1), max(seconds, default=0.0)
    return f"A search took {mean:.1f} CPU seconds in the mean, and at most {most:.0f}."


def write(answers: Sequence[Mapping[str, Any]]) -> None:
    """Puts the table into the page."""
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, text(answers)), "utf-8")
