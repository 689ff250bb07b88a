"""What a report says of a fault: whether it finds, places and names it, and whom it blames else."""

from collections.abc import Iterable
from dataclasses import dataclass

from flax_attn.parity import ParityError, Report

from .listed import Fault
from .subjects import homes

QUESTIONS = FOUND, PLACED, NAMED = "found", "placed", "named"


@dataclass(frozen=True)
class Answer:
    """What the harness said of one fault at one amplitude.

    Attributes:
      fault, low: which, and at which amplitude.
      found: whether it was said at all.
      placed: whether in its place.
      named: whether in its words; None where no word is expected.
      innocent: the places that were blamed and are not at fault.
      misleads: whether a hint was given in other words; None where no word is expected.
      said: what was said.
    """

    fault: Fault
    low: bool
    found: bool
    placed: bool
    named: bool | None
    said: str
    innocent: tuple[str, ...] = ()
    misleads: bool | None = None

    def of(self, question: str) -> bool | None:
        """The answer to one of `QUESTIONS`; None where it is not asked."""
        return {FOUND: self.found, PLACED: self.placed, NAMED: self.named}[question]

    def __str__(self) -> str:
        marks = "".join(q[0] if self.of(q) is not False else "-" for q in QUESTIONS)
        size = "low " if self.low else "full"
        blamed = f"; innocent: {', '.join(self.innocent)}" if self.innocent else ""
        return f"{marks} {size} {self.fault}: {self.said}{blamed}"

    @property
    def expected(self) -> str:
        """What should have been said."""
        return f"{self.fault.place}; {self.fault.words}".rstrip("; ")


def judged(fault: Fault, low: bool = False) -> Answer:
    """Compares the wrong port."""
    try:
        report = fault.wrong(low).report()
    except ParityError as error:
        return _refused(fault, low, str(error))
    except Exception as error:  # a crash of the harness shows nothing
        return _answer(fault, low, False, False, "", f"crashed, {type(error).__name__}: {error}")
    if report.ok:
        return _noted(fault, low, report)
    first = report.first
    if first is None:  # nothing differs, and nothing is proven
        said = str(report).partition("\n")[0]
        return _answer(fault, low, True, fault.whole, str(report), said)
    facts = " ".join(row.verdict.note for row in report.failed if row.name == first.tap)
    placed = any(is_place(first.tap, place) for place in fault.places)
    if first.kind not in ("value", "gradient"):  # a fact, in a sentence that names the place
        placed |= any(place in facts for place in fault.places)
    told = f"{first.hint} {first.note} {facts}"
    if fault.whole:
        placed |= first.tap not in {row.name for row in report.rows if row.kind == "tap"}
        told += f" {report}"
    said = f"{first.tap} ({first.kind}), {first.hint or facts.strip() or 'no hint'}"
    innocent = _innocent(fault, (divergence.tap for divergence in report.divergences))
    return _answer(fault, low, True, placed, told, said, innocent, bool(first.hint))


def is_place(tap: str, place: str) -> bool:
    """An output may also be said to be what lies between the last tap and itself."""
    return tap == place or (place.startswith("output") and tap.endswith(f" and {place}"))


def _refused(fault: Fault, low: bool, sentence: str) -> Answer:
    """A refusal finds a fault if it names its place, and if the right port is not refused so.

    That a module cannot run proves nothing.
    """
    ran = " fails in " not in sentence.partition("\n")[0]
    ran &= bool(fault.lonely) or _refusal(fault) != sentence
    here = any(place in sentence for place in fault.places)
    here |= fault.whole and (not fault.wanted or any(word in sentence for word in fault.wanted))
    said = f"refused, {' '.join(sentence.split())}"
    return _answer(fault, low, ran and here, here, sentence, said)


def _refusal(fault: Fault) -> str:
    """Why the right port cannot be compared, or ""."""
    try:
        homes()[fault.port][1].report()
    except ParityError as error:
        return str(error)
    return ""


def _noted(fault: Fault, low: bool, report: Report) -> Answer:
    """An equal report finds a fault by a note, if that is enough and the right port has none."""
    found = [note for note in report.notes if fault.noted and _speaks(fault, note)]
    if found and not fault.lonely:
        right = homes()[fault.port][1].report().notes
        found = [note for note in found if note not in right]
    said = found[0] if found else report.verdict
    return _answer(fault, low, bool(found), bool(found), said, said)


def _speaks(fault: Fault, note: str) -> bool:
    """Whether a note says what is wrong, and where."""
    right = fault.whole or any(place in note for place in fault.places)
    return right and any(word in note for word in fault.wanted)


def _innocent(fault: Fault, blamed: Iterable[str]) -> tuple[str, ...]:
    guilty = [*fault.places, *fault.also.split("|")]
    return tuple(tap for tap in dict.fromkeys(blamed) if not any(is_place(tap, g) for g in guilty))


def _answer(
    fault: Fault,
    low: bool,
    found: bool,
    placed: bool,
    told: str,
    said: str,
    innocent: tuple[str, ...] = (),
    hinted: bool = False,
) -> Answer:
    named = found and any(word in told for word in fault.wanted) if fault.wanted else None
    misleads = None if named is None else hinted and not named
    return Answer(fault, low, found, found and placed, named, said, innocent, misleads)
