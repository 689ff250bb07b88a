"""The text of a report: the first difference with its likely cause, its effects, and the notes."""

from collections.abc import Sequence

import numpy as np

from ..repeated import of_layers, together
from ..report import Divergence, Report, Row, badness, plural

# Maximum number of places and names that a report lists.
MAX_LISTED = 6
# Row kinds for which torch's own rounding noise is reported.
MEASURED = ("tap", "output", "gradient")


def lines_of(report: Report) -> list[str]:
    """The lines of the report: a summary, or the first difference, its cause and its effects."""
    count = len(report.failed)
    lines = [f"{report.title}: {plural(len(report.rows), 'comparison')}, {count} different"]
    if not report.ok and not count:
        lines.append(f"  {unproven(report)}")
    elif not count:
        lines.append(f"  {report.summary()}")
    else:
        lines += [*_first(report), *_others(report), "  what it does:"]
        lines += [f"    {line}" for line in effects(report)]
    lines += [f"  {line}" for line in _layers(report)]
    states = {row.name for row in report.rows if row.kind == "state"}
    facts = (
        ("constant, not carried", tuple(x for x in report.constants if x not in states)),
        ("seen on one side only", report.unpaired),
        ("computed another way inside, with the same result", report.rewritten),
        (
            "equal as far as this input can tell: within torch's own rounding noise",
            report.unsure if report.ok else (),
        ),
    )
    lines += [f"  {what}: {_few(names)}" for what, names in facts if names]
    lines += [f"  {note}" for note in (*together(report.notes), report.replayed) if note]
    return lines + _noise(report)


def see_again(report: Report) -> list[str]:
    """The commands that repeat a comparison that failed."""
    if not report.failed or not report.reproduce:
        return []
    lines = [f"  see it again  {report.reproduce}"]
    if report.reproduce.startswith("flax-attn"):
        lines.append(f"  as a page     {report.reproduce} --html report.html")
    return lines


def _layers(report: Report) -> list[str]:
    """One line per list of repeated layers, using local errors where available."""
    backward = report.first is not None and _backward(report.first)
    kind = "local gradient" if backward else "local"
    rows = [row for row in report.local if row.kind == kind]
    rows = rows or [row for row in report.rows if row.kind in ("tap", "gradient")]
    errors: dict[str, float] = {}
    for row in rows:
        if row.dtype == "float64" and row.verdict.shows:
            errors[row.name] = max(errors.get(row.name, 0.0), badness(row.verdict.error))
    return of_layers(errors, [row.name for row in rows if row.verdict.differs])


def unproven(report: Report) -> str:
    """Why nothing is proven although no comparison failed."""
    if not report.rows:
        return "nothing was compared, so nothing is proven"
    whys = dict.fromkeys(f"{r.name}: {r.verdict.note}" for r in report.rows if r.kind == "output")
    return "nothing is proven: " + (_few(tuple(whys)) or "no output was compared")


def _first(report: Report) -> list[str]:
    """The verdict, and the place with its neighbours: local error and accumulated error."""
    first = report.first
    if first is None:
        return []
    description = f": looks like {first.hint}" if first.hint else ""
    more = (f"note: {first.note}" if first.note else "", first.advice)
    lines = [f"DIFFERENT {first.place}{description}", *(f"  {x}" for x in more if x)]
    rows = [row for row in report.local if (row.kind == "local gradient") == _backward(first)]
    names = [row.name for row in rows]
    if first.tap not in names:
        return [
            *lines,
            f"  error {first.error:.1e}, limit {first.limit:.1e}{_worst_noise_line(first)}",
        ]
    at = names.index(first.tap)
    neighbours = rows[max(at - 1, 0) : at + 2]
    kinds = ("gradient",) if _backward(first) else ("tap", "output")
    accumulated_error = {
        row.name: f"{row.verdict.error:.1e}" for row in report.rows[::-1] if row.kind in kinds
    }
    cells = [("", "local error", "accumulated", "limit")]
    for row in neighbours:
        here = row.name == first.tap
        errors = f"{row.verdict.error:.1e}", accumulated_error.get(row.name, "")
        limit = f"{row.verdict.limit:.1e}{_worst_noise_line(first) if here else ''}"
        cells.append((f"{'>' if here else ' '} {row.name}", *errors, limit))
    return [*lines, *_aligned(cells, "  ")]


def _backward(place: Divergence) -> bool:
    return place.kind == "gradient"


def _worst_noise_line(place: Divergence) -> str:
    if place.index is None:
        return ""
    at = ", ".join(map(str, place.index))
    return f"   [{at}]: Flax {place.got:.9g}, torch {place.want:.9g}"


def _others(report: Report) -> list[str]:
    lines = []
    for place in report.divergences[1:MAX_LISTED]:
        description = f": looks like {place.hint}" if place.hint else ""
        where = place.place.removeprefix("at ")
        lines.append(f"  also {where}, {place.error:.1e}{description}")
        more = (f"note: {place.note}" if place.note else "", place.advice)
        lines += [f"    {x}" for x in more if x]
    rest = len(report.divergences) - MAX_LISTED
    return lines + ([f"  and {plural(rest, 'place')} more"] if rest > 0 else [])


def effects(report: Report) -> list[str]:
    """The failed comparisons, one line per dtype and kind."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in report.failed:
        groups.setdefault((row.dtype, row.kind), []).append(row)
    lines = []
    for (dtype, kind), rows in groups.items():
        of = sum(row.kind == kind and row.dtype == dtype for row in report.rows)
        worst = max(rows, key=lambda row: np.nan_to_num(row.verdict.error, nan=np.inf))
        line = f"{dtype:<9} {kind:<9} {len(rows)} of {of} over the limit, worst "
        line += f"{worst.name} {worst.verdict.error:.1e}"
        if worst.verdict.other_error is not None:
            line += f" (torch's own {worst.verdict.other_error:.1e})"
        lines.append(f"{line}  {worst.verdict.note}".rstrip())
    return lines


def _noise(report: Report) -> list[str]:
    """One line for each compared value in each dtype; empty unless noise was requested.

    Shows Flax's error next to torch's rounding noise: the change when each torch operation is
    perturbed by up to one ulp, measured in the same way. In narrow dtypes also torch's own error.
    """
    rows = [row for row in report.rows if row.verdict.noise is not None and row.kind in MEASURED]
    if not report.noise or not rows:
        return []
    last = {(row.dtype, row.kind, row.name): row for row in rows}
    cells: list[tuple[str, ...]] = [("", "error", "noise", "torch's own error")]
    for (dtype, kind, name), row in last.items():
        errors = row.verdict.error, row.verdict.noise, row.verdict.other_error
        what = f"{dtype:<9} {kind:<9} {name}"
        cells.append((what, *("" if x is None else f"{x:.1e}" for x in errors)))
    heading = "  how much difference is normal here: torch's own rounding noise beside each error"
    return [heading, *_aligned(cells, "    ")]


def _aligned(rows: Sequence[Sequence[str]], indent: str) -> list[str]:
    """The lines of a table, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    placed = ([x.ljust(width) for x, width in zip(row, widths, strict=True)] for row in rows)
    return [(indent + "  ".join(cells)).rstrip() for cells in placed]


def _few(names: Sequence[str]) -> str:
    names = together(names)
    rest = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
