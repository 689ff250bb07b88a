"""What `flax-attn parity` is asked for, and what it gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..parity.cases.markdown import PageFacts
from ..parity.cases.prove import Job
from ..parity.report import Report

Proof = tuple[str, str, Report]


@dataclass(frozen=True)
class ParityOptions:
    """What to compare, and how.

    Attributes:
      package: the package of this library's cases.
      names: the command's arguments.
      live: whether to compare with torch, else with its record.
      record: whether torch's results are recorded first.
      page: the page on which to write the table, if any.
      seed: replaces each case's own.
      short: whether to run only the fixed set, in float64 under jit.
      settings: environment variables of the workers.
      devices: number of devices over which inputs are sharded, if any.
    """

    package: str
    names: Sequence[str] = ()
    live: bool = True
    record: bool = False
    page: Path | None = None
    seed: int | None = None
    short: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None


@dataclass
class Results:
    """Results.

    Attributes:
      proofs: variant, reference and report of every comparison.
      about: by variant, facts of its page row that reports do not contain.
      untried: what the fixed set leaves out, if only that was run.
      devices: by variant and reference, the split of the first case: batch x length.
      interrupted: whether Ctrl-C ended it early.
      missing: variant, reference and title of the cases that were not proven because of that.
    """

    proofs: list[Proof] = field(default_factory=list)
    about: dict[str, PageFacts] = field(default_factory=dict)
    untried: "Remaining | None" = None
    devices: dict[tuple[str, str], str] = field(default_factory=dict)
    interrupted: bool = False
    missing: list[tuple[str, str, str]] = field(default_factory=list)

    def interrupt(self, rest: Sequence[Job]) -> None:
        """Records that Ctrl-C came before the jobs in `rest` were done."""
        self.interrupted = True
        self.missing += [job.listed[3:6] for job in rest]

    @property
    def whole(self) -> list[Proof]:
        """The comparisons of variants of which no case is missing."""
        part = {variant for variant, *_ in self.missing}
        return [proof for proof in self.proofs if proof[0] not in part]


class Remaining(NamedTuple):
    """What the fixed set leaves out: numbers of cases and variants, and the estimated time."""

    cases: int
    variants: int
    seconds: float
