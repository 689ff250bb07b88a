"""What `flax-attn parity` gives: a row for every comparison, proven or not yet."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..parity.cases.markdown import PageFacts
from ..parity.report import Report

Proof = tuple[str, str, Report]  # variant, reference and report


@dataclass(eq=False)
class Row:
    """One comparison: a case or another, its report once it is proven, and its split if sharded."""

    variant: str
    reference: str
    title: str
    report: Report | None = None
    devices: str = "-"


@dataclass
class Results:
    """All comparisons, in their order.

    Attributes:
      rows: the comparisons.
      about: by variant, facts of its page row that reports do not contain.
      untried: how many cases, and of how many variants, the fixed set leaves out.
      interrupted: whether Ctrl-C ended it early.
    """

    rows: list[Row] = field(default_factory=list)
    about: dict[str, PageFacts] = field(default_factory=dict)
    untried: tuple[int, int] | None = None
    interrupted: bool = False

    def begin(self, titles: Iterable[tuple[str, str, str]]) -> list[Row]:
        """Adds and returns a row, not yet proven, for each variant, reference and title."""
        rows = [Row(*title) for title in titles]
        self.rows += rows
        return rows

    def add(self, proofs: Iterable[Proof]) -> None:
        """Adds comparisons that are proven."""
        self.rows += [Row(*proof[:2], proof[2].title, proof[2]) for proof in proofs]

    @property
    def proofs(self) -> list[Proof]:
        """The comparisons that are proven."""
        return [(x.variant, x.reference, x.report) for x in self.rows if x.report is not None]

    @property
    def missing(self) -> list[Row]:
        """The comparisons that Ctrl-C prevented."""
        return [row for row in self.rows if row.report is None]
