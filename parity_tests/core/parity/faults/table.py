"""The kill table: of each group how many faults are detected, blamed on their tap and named."""

from dataclasses import dataclass
from functools import cache

from flax_attn.parity import ParityError

from . import FAULTS
from .fault import GROUPS, Fault
from .tally import Tally
from .tally import share as share

QUESTIONS = DETECTED, BLAMED, NAMED = "detected", "blamed", "named"


@dataclass(frozen=True)
class Outcome:
    """What the harness said of one fault.

    Attributes:
      fault, low: which, and at which amplitude.
      detected: whether the report is not ok, or, where no tap is at fault, there is none at all.
      tap, hint: of the report's first divergence.
    """

    fault: Fault
    low: bool
    detected: bool
    tap: str
    hint: str

    def of(self, question: str) -> bool | None:
        """The answer to one of the three questions; None where it is not asked."""
        if question == DETECTED:
            return self.detected
        if question == BLAMED:
            return self.detected and self._in_place() if self.fault.tap else None
        ways = self.fault.hint.split("|")
        return self.detected and any(way in self.hint for way in ways) if ways[0] else None

    def _in_place(self) -> bool:
        """At its tap, or right before it, between the tap before and this."""
        return self.tap == self.fault.tap or self.tap.endswith(f" and {self.fault.tap}")

    def __str__(self) -> str:
        size = "low " if self.low else "full"
        said = f"{self.tap or 'no tap'}, {self.hint or 'no hint'}"
        return f"{size} {self.fault}: {said if self.detected else 'not detected'}"


def judged(fault: Fault, low: bool) -> Outcome:
    """Plants the fault and compares. A ParityError is no detection of what lies at a tap.

    Raises:
      ParityError: if a module fails to run, which proves nothing.
    """
    try:
        report = fault.setup(low).report()
    except ParityError as error:
        if " fails in " in str(error):
            raise
        return Outcome(fault, low, not fault.tap, "", str(error).partition("\n")[0])
    first = report.first
    return Outcome(
        fault,
        low,
        not report.ok,
        first.tap if first else "",
        f"{first.hint} {first.note}".strip() if first else "",
    )


@cache
def outcomes(amplitudes: tuple[bool, ...] = (False, True), step: int = 1) -> tuple[Outcome, ...]:
    """Every fault, or one in `step`, at these amplitudes, full or low, once in a process."""
    return tuple(judged(fault, low) for low in amplitudes for fault in FAULTS[::step])


TALLY = Tally(
    "planted faults", GROUPS, QUESTIONS, lambda fault: f"{fault.tap} {fault.hint}".rstrip()
)
text, markdown, missed = TALLY.text, TALLY.markdown, TALLY.missed
