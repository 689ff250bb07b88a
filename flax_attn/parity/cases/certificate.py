"""The certificate: one line for each variant and witness, from the reports of its cases."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.table import Table

from ..report import ANOTHER_WAY, DIFFERENT, EQUAL, NOTHING, UNSURE, Report, badness, plural, times

WORST_FIRST = (DIFFERENT, NOTHING, UNSURE, ANOTHER_WAY, EQUAL)
HEADINGS = ("variant", "proven equal to", "params", "float64", "grads", "float32", "bfloat16", "")


@dataclass
class Line:
    """All reports of one variant against one witness."""

    variant: str
    proven_equal_to: str
    reports: list[Report] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every report is."""
        return all(report.ok for report in self.reports)

    @property
    def verdict(self) -> str:
        """The worst of the reports'."""
        return min((report.verdict for report in self.reports), key=WORST_FIRST.index)

    def cells(self) -> tuple[str, ...]:
        """What the table shows: tensors carried, errors in float64, errors over torch's own."""
        return (
            self.variant,
            self.proven_equal_to,
            str(max(report.params for report in self.reports)),
            self.error("output", "tap"),
            self.error("gradient"),
            self.ratio("float32"),
            self.ratio("bfloat16"),
            self.verdict,
        )

    def error(self, *kinds: str) -> str:
        """The largest float64 error of rows of these kinds; "-" if there are none."""
        found = [report.worst("float64", *kinds) for report in self.reports]
        found = [error for error in found if error is not None]
        return f"{max(found, key=badness):.1e}" if found else "-"

    def ratio(self, dtype: str) -> str:
        """The largest error over torch's own in one dtype; "-" if none was measured."""
        found = [report.ratio(dtype) for report in self.reports]
        found = [ratio for ratio in found if ratio is not None]
        return times(max(found, key=badness)) if found else "-"


def lines(reports: Iterable[tuple[str, str, Report]]) -> list[Line]:
    """One line for each variant and witness, in order of appearance."""
    found: dict[tuple[str, str], Line] = {}
    for variant, witness, report in reports:
        found.setdefault((variant, witness), Line(variant, witness)).reports.append(report)
    order = {variant: i for i, variant in enumerate(dict.fromkeys(v for v, _ in found))}
    return sorted(found.values(), key=lambda line: order[line.variant])


def table(found: list[Line]) -> Table:
    """The certificate for a terminal; a variant's name stands once."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for i, heading in enumerate(HEADINGS):
        shown.add_column(heading, justify="right" if 2 <= i <= 6 else "left", no_wrap=True)
    before = ""
    for line in found:
        variant, *cells = line.cells()
        shown.add_row("" if variant == before else variant, *cells, style="" if line.ok else "red")
        before = variant
    return shown


def footer(
    found: list[Line], versions: dict[str, str], seconds: float, strict: bool = False
) -> str:
    """How many variants and cases, how many not equal, by which versions, in what time."""
    variants = len({line.variant for line in found})
    told = [report.verdict for line in found for report in line.reports]
    different = told.count(DIFFERENT) + told.count(UNSURE) * strict
    counts = f"{plural(variants, 'variant')}, {plural(len(told), 'case')}"
    nothing = f", {told.count(NOTHING)} not proven" if NOTHING in told else ""
    return (
        f"{counts}, {different} different{nothing}; "
        f"torch {versions.get('torch', 'missing')}, jax {versions.get('jax')}, {seconds:.0f} s"
    )
