"""The certificate: one line for each variant and witness, from the reports of its cases."""

from collections.abc import Iterable, Mapping
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
            self._error("output", "tap"),
            self._error("gradient"),
            self._ratio("float32"),
            self._ratio("bfloat16"),
            self.verdict,
        )

    def _error(self, *kinds: str) -> str:
        found = [report.worst("float64", *kinds) for report in self.reports]
        found = [error for error in found if error is not None]
        return f"{max(found, key=badness):.1e}" if found else "-"

    def _ratio(self, dtype: str) -> str:
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


def markdown(found: list[Line], backends: Mapping[str, str]) -> str:
    """The certificate as a Markdown table, one row a variant with all its witnesses.

    Args:
      found: the lines.
      backends: by variant, on which backends it is equal; "-" stands where none was tried.
    """
    variants: dict[str, Line] = {}
    for line in found:
        whole = variants.setdefault(line.variant, Line(line.variant, ""))
        whole.proven_equal_to += "; " * bool(whole.reports) + line.proven_equal_to
        whole.reports += line.reports
    rows = [HEADINGS, ("---",) * len(HEADINGS), *(line.cells() for line in variants.values())]
    column = ["backends", "---", *(backends.get(variant, "-") for variant in variants)]
    rows = [(*row[:2], cell, *row[2:]) for row, cell in zip(rows, column, strict=True)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def joined(held: str, new: str) -> str:
    """A Markdown table with new rows in the places of their variants, or in alphabetical order.

    >>> print(joined("| v |\\n| --- |\\n| b | 1 |", "| v |\\n| --- |\\n| a | 2 |"), end="")
    | v |
    | --- |
    | a | 2 |
    | b | 1 |
    """
    head, lines = new.splitlines()[:2], [*held.splitlines()[2:], *new.splitlines()[2:]]
    rows = {line.split("|")[1]: line for line in lines}
    return "\n".join((*head, *(rows[name] for name in sorted(rows)))) + "\n"


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
