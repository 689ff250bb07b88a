"""The strange trial's table: of each group how many faults are found, placed and named."""

from dataclasses import dataclass
from functools import cache

from flax_attn.parity import ParityError, Report

from ..tally import Tally
from ..tally import share as share
from .fault import GROUPS, Strange
from .pair import FULL, LOW, Pair

QUESTIONS = FOUND, PLACED, NAMED = "found", "placed", "named"


@dataclass(frozen=True)
class Row:
    """What the harness said of one fault at one amplitude.

    Attributes:
      fault, low: which, and at which amplitude.
      found: whether it was told at all.
      placed, named: whether rightly; None where that is not asked.
      said: what was said.
    """

    fault: Strange
    low: bool
    found: bool
    placed: bool | None
    named: bool | None
    said: str

    def of(self, question: str) -> bool | None:
        """The answer to one of the three questions; None where it is not asked."""
        return {FOUND: self.found, PLACED: self.placed, NAMED: self.named}[question]

    def __str__(self) -> str:
        return f"{'low ' if self.low else 'full'} {self.fault}: {self.said}"


def judged(fault: Strange, low: bool) -> Row:
    """Plants the fault and compares."""
    try:
        report = fault.pair.report(LOW if low else FULL)
    except ParityError as error:
        return refused(fault, low, str(error))
    except Exception as error:  # a crash of the harness shows nothing
        said = f"crashed, {type(error).__name__}: {error}"
        return _row(fault, low, False, False, "", said)
    if report.ok:
        return _only_noted(fault, low, report)
    first = report.first
    if first is None:  # nothing differs, and nothing is proven
        return _row(fault, low, True, fault.whole, str(report), str(report).partition("\n")[0])
    facts = " ".join(row.verdict.note for row in report.failed if row.name == first.tap)
    told = f"{first.hint} {first.note} {facts}"
    placed = any(is_place(first.tap, place) for place in fault.places)
    if first.kind not in ("value", "gradient"):  # a fact, told in a sentence that names the place
        placed |= any(_names(place, facts) for place in fault.places)
    if fault.whole:
        placed |= first.tap not in {row.name for row in report.rows if row.kind == "tap"}
        told += f" {report}"
    said = f"{first.tap} ({first.kind}), {first.hint or facts or 'no hint'}"
    return _row(fault, low, True, placed, told, said)


def refused(fault: Strange, low: bool, sentence: str) -> Row:
    """A refusal finds the fault if it names its place, and if the right pair is not refused so.

    That a module cannot run proves nothing.
    """
    ran = " fails in " not in sentence.partition("\n")[0]
    ran &= bool(fault.lonely) or _refusal(fault) != sentence
    here = any(_names(place, sentence) for place in fault.places)
    here |= fault.whole and any(word in sentence for word in fault.words)
    said = f"refused, {sentence.partition(chr(10))[0]}"
    return _row(fault, low, ran and here, here, sentence, said)


def _refusal(fault: Strange) -> str:
    """Why the pair cannot be compared even without the fault, or ""."""
    try:
        fault.pair.report()
    except ParityError as error:
        return str(error)
    return ""


def _only_noted(fault: Strange, low: bool, report: Report) -> Row:
    """An equal report finds a fault by a note, if that is enough and the right pair lacks it."""
    found = [note for note in report.notes if fault.noted and speaks(fault, note)]
    if found and not fault.lonely:
        right = fault.pair.report().notes
        found = [note for note in found if note not in right]
    said = found[0] if found else "equal"
    return _row(fault, low, bool(found), bool(found), said, said)


def speaks(fault: Strange, note: str) -> bool:
    """Whether a note says what is wrong, and where."""
    right = fault.whole or any(_names(place, note) for place in fault.places)
    return right and any(word in note for word in fault.words)


def is_place(tap: str, place: str) -> bool:
    """An output may also be told as what lies between the last tap and itself."""
    return tap == place or (place.startswith("output") and tap.endswith(f" and {place}"))


def _names(place: str, sentence: str) -> bool:
    return place in sentence


def _row(fault: Strange, low: bool, found: bool, placed: bool, told: str, said: str) -> Row:
    named = found and any(word in told for word in fault.words) if fault.words else None
    return Row(fault, low, found, found and placed, named, said)


@cache
def run_all(amplitudes: tuple[bool, ...] = (False, True), step: int = 1) -> tuple[Row, ...]:
    """Every fault, or one in `step`, at full size and, where it has one, at low amplitude."""
    from . import FAULTS

    tried = ((fault, low) for low in amplitudes for fault in FAULTS[::step])
    return tuple(judged(fault, low) for fault, low in tried if fault.low or not low)


TALLY = Tally(
    "strange faults", GROUPS, QUESTIONS, lambda fault: f"{fault.place}; {fault.hint}".rstrip("; ")
)
text, markdown, missed = TALLY.text, TALLY.markdown, TALLY.missed


def verdict(pair: Pair) -> str:
    """Of a pair without a fault: "equal", or the first line of what was said instead."""
    try:
        report = pair.report()
    except Exception as error:
        return f"{type(error).__name__}, {str(error).partition(chr(10))[0]}"
    first = report.first
    return "equal" if report.ok else f"different at {first.tap if first else 'nothing'}"
