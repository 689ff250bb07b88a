"""The certificate: one line per variant and reference, from the reports of its cases."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from ..report import ANOTHER_WAY, DIFFERENT, EQUAL, NOTHING, UNSURE, Report, badness, times

WORST_FIRST = (DIFFERENT, NOTHING, UNSURE, ANOTHER_WAY, EQUAL)
HEADINGS = ("variant", "proven equal to", "devices", "params")
HEADINGS += ("float64", "grads", "decoded", "float32", "bfloat16", "")
SOME = ("devices", "decoded", "float32", "bfloat16")  # columns omitted if no line has a value


@dataclass
class Line:
    """All reports of one variant against one reference, and the number of devices used."""

    variant: str
    proven_equal_to: str
    reports: list[Report] = field(default_factory=list)
    devices: str = "-"

    @property
    def ok(self) -> bool:
        """Whether there is at least one report and all are ok."""
        return bool(self.reports) and all(report.ok for report in self.reports)

    @property
    def verdict(self) -> str:
        """The worst verdict of the reports."""
        return min((report.verdict for report in self.reports), key=WORST_FIRST.index)

    @property
    def replayed(self) -> bool:
        """Whether recorded results replaced a reference that is not installed."""
        return any(report.replayed for report in self.reports)

    @property
    def shown_verdict(self) -> str:
        """The verdict as shown in a table."""
        return self.verdict + ", recorded" * self.replayed

    def cells(self) -> tuple[str, ...]:
        """Table cells: tensors copied, float64 errors, errors relative to torch's own."""
        return (
            self.variant,
            self.proven_equal_to,
            self.devices,
            str(max(report.params for report in self.reports)),
            self.error("output", "tap"),
            self.error("gradient"),
            self.error("decode"),
            self.ratio("float32"),
            self.ratio("bfloat16"),
            self.shown_verdict,
        )

    def error(self, *kinds: str) -> str:
        """The largest float64 error of rows of these kinds; "-" if there are none."""
        errors = [report.worst("float64", *kinds) for report in self.reports]
        errors = [error for error in errors if error is not None]
        return f"{max(errors, key=badness):.1e}" if errors else "-"

    def ratio(self, dtype: str) -> str:
        """The largest error divided by torch's own in one dtype; "-" if not measured."""
        ratios = [report.ratio(dtype) for report in self.reports]
        ratios = [ratio for ratio in ratios if ratio is not None]
        return times(max(ratios, key=badness)) if ratios else "-"


def lines(reports: Iterable[tuple[str, str, Report]]) -> list[Line]:
    """One line for each variant and reference, in order of appearance."""
    by_reference: dict[tuple[str, str], Line] = {}
    for variant, reference, report in reports:
        by_reference.setdefault((variant, reference), Line(variant, reference)).reports.append(
            report
        )
    order = {variant: i for i, variant in enumerate(dict.fromkeys(v for v, _ in by_reference))}
    return sorted(by_reference.values(), key=lambda line: order[line.variant])


def table(lines: Sequence[Line], width: int, strict: bool = False) -> Table:
    """The certificate for a terminal; each variant's name is shown once.

    Equal is green, and different red.

    Args:
      lines: the lines.
      width: terminal width in columns. If a line needs more, variants get their own lines and names
        are wrapped.
      strict: whether equality within rounding noise only is shown as different.
    """
    headings, cells = columns(lines)
    needed = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    *numbers, verdicts = needed[2:]
    is_narrow = sum(needed) + 2 * (len(needed) - 1) > width
    padding = (0, 1, 0, 0) if is_narrow else (0, 1)
    shown = Table(box=None, pad_edge=False, padding=padding, header_style="bold")
    names = needed[0]
    if is_narrow:
        left = width - sum(numbers) - len(needed[2:])
        longest = max(len(name) for row in cells for name in (row[0], f" {row[1]}"))
        names = max(min(longest, left - 9), 12)  # "DIFFERENT" has nine letters
        verdicts = max(min(verdicts, left - names), 9)
        shown.add_column("variant, equal to", width=names, no_wrap=True)
    else:
        shown.add_column(headings[0], no_wrap=True)
        shown.add_column(headings[1], no_wrap=True)
    for heading, number in zip(headings[2:-1], numbers, strict=True):
        shown.add_column(heading, justify="right", width=number, no_wrap=True)
    shown.add_column("", width=verdicts)
    before = None
    for line, (variant, reference, *rest, verdict) in zip(lines, cells, strict=True):
        style = "green" if line.verdict in (EQUAL, ANOTHER_WAY) else ""
        if not line.ok or (strict and not all(report.certain for report in line.reports)):
            style = "red"
        new = "" if variant == before else variant
        if is_narrow and new:
            shown.add_row(wrap_name(variant, names))
        first = [wrap_name(reference, names, " ")] if is_narrow else [new, reference]
        shown.add_row(*first, *rest, Text(verdict, style))
        before = variant
    return shown


def columns(lines: Sequence[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The headings and the cells of each line, without empty columns of `SOME`."""
    cells = [line.cells() for line in lines]
    filled = [any(cell != "-" for cell in column) for column in zip(*cells, strict=True)]
    shown = [i for i, name in enumerate(HEADINGS) if name not in SOME or (filled and filled[i])]
    headings, *cells = (tuple(row[i] for i in shown) for row in (HEADINGS, *cells))
    return headings, cells


def wrap_name(name: str, width: int, indent: str = "") -> str:
    """Wraps a name to a width, breaking after dots, spaces and underscores where possible.

    >>> print(wrap_name("torch.nn.functional.scaled_dot_product_attention", 28, "  "))
      torch.nn.functional.
      scaled_dot_product_
      attention
    """
    lines, room = [""], max(width - len(indent), 1)
    for piece in re.split(r"(?<=[. _])", name):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > room:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > room:
            lines[-1:] = [lines[-1][:room], lines[-1][room:]]
    return "\n".join(indent + line.rstrip() for line in lines)
