"""The third trial's table: of each block how many mistakes are found, placed and named."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from flax_attn._internal.markdown import table as grid
from flax_attn.parity import ParityError, Report

from ..strange.table import is_place
from ..tally import Tally
from ..tally import share as share
from .mistake import Mistake

QUESTIONS = FOUND, PLACED, NAMED = "found", "placed", "named"
HARMS = INNOCENT, MISLEADS = "innocent", "misleads"


@dataclass(frozen=True)
class Row:
    """What the harness said of one mistake.

    Attributes:
      fault: which.
      found: whether it was told at all.
      placed, named: whether rightly; `named` is None where no word is expected.
      innocent: the places that were blamed and are not at fault.
      misleads: whether a hint was given in other words; None where no word is expected.
      said: what was said.
    """

    fault: Mistake
    found: bool
    placed: bool
    named: bool | None
    innocent: tuple[str, ...]
    misleads: bool | None
    said: str

    @property
    def low(self) -> bool:
        """Every mistake is at its full size."""
        return False

    def of(self, question: str) -> bool | None:
        """The answer to one question; None where it is not asked."""
        answers = (self.found, self.placed, self.named, bool(self.innocent), self.misleads)
        return dict(zip((*QUESTIONS, *HARMS), answers, strict=True))[question]

    def __str__(self) -> str:
        return f"{self.fault}: {self.said}"


def judged(mistake: Mistake) -> Row:
    """Compares the wrong port."""
    try:
        report = mistake.report()
    except ParityError as error:
        return _refused(mistake, str(error))
    except Exception as error:  # a crash of the harness shows nothing
        said = f"crashed, {type(error).__name__}: {error}"
        return Row(mistake, False, False, _named(mistake, ""), (), None, said)
    first = report.first
    if report.ok or first is None:
        return Row(mistake, not report.ok, False, _named(mistake, ""), (), None, report.verdict)
    facts = " ".join(row.verdict.note for row in report.failed if row.name == first.tap).strip()
    placed = any(is_place(first.tap, place) for place in mistake.places)
    named = _named(mistake, f"{first.hint} {first.note} {facts}")
    misleads = None if named is None else bool(first.hint) and not named
    said = f"{first.tap} ({first.kind}), {first.hint or facts or 'no hint'}"
    innocent = _innocent(mistake, report)
    said += f"; innocent: {', '.join(innocent)}" if innocent else ""
    return Row(mistake, True, placed, named, innocent, misleads, said)


def _refused(mistake: Mistake, sentence: str) -> Row:
    """A refusal finds a mistake if it names its place: the right port is not refused."""
    here = any(place in sentence for place in mistake.places)
    said = f"refused, {' '.join(sentence.split())}"
    return Row(mistake, here, here, _named(mistake, sentence if here else ""), (), None, said)


def _named(mistake: Mistake, told: str) -> bool | None:
    return any(word in told for word in mistake.words) if mistake.words else None


def _innocent(mistake: Mistake, report: Report) -> tuple[str, ...]:
    blamed = dict.fromkeys(divergence.tap for divergence in report.divergences)
    return tuple(tap for tap in blamed if not any(is_place(tap, p) for p in mistake.guilty))


@cache
def run_all() -> tuple[Row, ...]:
    """Every mistake."""
    from . import MISTAKES

    return tuple(judged(mistake) for mistake in MISTAKES)


def text(rows: Sequence[Row]) -> str:
    """The table as text, what was missed, and how many rows do harm."""
    groups = list(dict.fromkeys(row.fault.group for row in rows))
    lines = [Tally("ported blocks", groups, QUESTIONS, expected).text(rows), ""]
    for harm in HARMS:
        harmful = [row for row in rows if row.of(harm)]
        lines.append(f"{harm}: {'{}/{}'.format(*share(rows, harm))}")
        lines += [f"  {row}, expected {expected(row.fault)}" for row in harmful]
    return "\n".join(lines)


# What the harness said when the list was made, before anybody mended anything for it.
BEFORE = ("39/40", "39/40", "8/39")


def markdown(rows: Sequence[Row]) -> str:
    """The table for a page: a line for each block, and all of them as it was before and is now."""

    def cells(answers: Sequence[Row]) -> list[str]:
        return ["{}/{}".format(*share(answers, question)) for question in QUESTIONS]

    groups = dict.fromkeys(row.fault.group for row in rows)
    lines = [[f"`{g}`", *cells([row for row in rows if row.fault.group == g])] for g in groups]
    lines += [["**all, before**", *BEFORE], ["**all**", *cells(rows)]]
    harms = ", ".join("{} {} of {}".format(harm, *share(rows, harm)) for harm in HARMS)
    return f"{grid(['block', *QUESTIONS], lines).rstrip()}\n\nWrong reports: {harms}."


def expected(mistake: Mistake) -> str:
    """What should have been said."""
    return f"{mistake.place}; {mistake.hint}".rstrip("; ")
