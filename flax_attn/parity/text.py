"""A report on one screen of a terminal."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .report import Divergence, Report, Row

# How many places, neighbours and names a report shows.
MANY = 6
# What torch's own rounding noise is told of.
MEASURED = ("tap", "output", "gradient")


def text(report: "Report") -> str:
    """What was compared, or what differs first, where, what it looks like, and what it does."""
    count = len(report.failed)
    lines = [f"{report.title}: {len(report.rows)} comparisons, {count} different"]
    if not report.ok and not count:
        lines.append(f"  {unproven(report)}")
    elif not count:
        lines.append(f"  {report.summary()}")
    else:
        lines += [*_first(report), *_others(report), *_results(report)]
    told = (
        ("constant, not carried", report.constants),
        ("seen on one side only", report.unpaired),
        ("computed another way inside, with the same result", report.rewritten),
        (
            "equal as far as this input can tell: within torch's own rounding noise",
            report.unsure if report.ok else (),
        ),
    )
    lines += [f"  {what}: {_few(names)}" for what, names in told if names]
    lines += [f"  {note}" for note in report.notes]
    lines += _noise(report)
    if count and report.reproduce:
        lines.append(f"  see it again  {report.reproduce}")
        if report.reproduce.startswith("flax-attn"):
            lines.append(f"  as a page     {report.reproduce} --html report.html")
    return "\n".join(lines)


def unproven(report: "Report") -> str:
    """Why nothing is proven although nothing differs."""
    if not report.rows:
        return "nothing was compared, so nothing is proven"
    whys = dict.fromkeys(f"{r.name}: {r.verdict.note}" for r in report.rows if r.kind == "output")
    return "nothing is proven: " + (_few(tuple(whys)) or "no output was compared")


def _first(report: "Report") -> list[str]:
    """The verdict, and the place between its neighbours: its own error, and the error so far."""
    first = report.first
    if first is None:
        return []
    looks = f": looks like {first.hint}" if first.hint else ""
    between = first.kind == "between"
    place = first.tap if between else f"at {first.tap} ({first.kind})"
    lines = [f"DIFFERENT {place}{looks}", *([f"  {first.advice}"] if first.advice else [])]
    rows = [row for row in report.local if (row.kind == "local gradient") == _backward(first)]
    names = [row.name for row in rows]
    if first.tap not in names:
        return [*lines, f"  error {first.error:.1e}, limit {first.limit:.1e}{_worst(first)}"]
    at = names.index(first.tap)
    near = rows[max(at - 1, 0) : at + 2]
    kinds = ("gradient",) if _backward(first) else ("tap", "output")
    so_far = {row.name: row.verdict.error for row in report.rows[::-1] if row.kind in kinds}
    wide = max(len(row.name) for row in near)
    lines.append(f"  {'':<{wide + 2}}  made here   so far    limit")
    for row in near:
        here = row.name == first.tap
        far = f"{so_far[row.name]:.1e}" if row.name in so_far else ""
        line = f"  {'>' if here else ' '} {row.name:<{wide}}  {row.verdict.error:.1e}"
        line += f"     {far:<9} {row.verdict.limit:.1e}"
        lines.append(line + (_worst(first) if here else ""))
    return lines


def _backward(place: "Divergence") -> bool:
    return place.kind == "gradient"


def _worst(place: "Divergence") -> str:
    if place.index is None:
        return ""
    at = ", ".join(map(str, place.index))
    return f"   [{at}]: Flax {place.got:.9g}, torch {place.want:.9g}"


def _others(report: "Report") -> list[str]:
    lines = []
    for place in report.divergences[1:MANY]:
        looks = f": looks like {place.hint}" if place.hint else ""
        told = place.tap if place.kind == "between" else f"{place.tap} ({place.kind})"
        lines.append(f"  also {told}, {place.error:.1e}{looks}")
        lines += [f"    {place.advice}"] if place.advice else []
    rest = len(report.divergences) - MANY
    return lines + ([f"  and {rest} places more"] if rest > 0 else [])


def _results(report: "Report") -> list[str]:
    """The failed comparisons, one line for each dtype and kind."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in report.failed:
        groups.setdefault((row.dtype, row.kind), []).append(row)
    lines = ["  what it does:"]
    for (dtype, kind), rows in groups.items():
        of = sum(row.kind == kind and row.dtype == dtype for row in report.rows)
        worst = max(rows, key=lambda row: np.nan_to_num(row.verdict.error, nan=np.inf))
        line = f"    {dtype:<9} {kind:<9} {len(rows)} of {of} over the limit, worst "
        line += f"{worst.name} {worst.verdict.error:.1e}"
        if worst.verdict.own is not None:
            line += f" (torch's own {worst.verdict.own:.1e})"
        lines.append(f"{line}  {worst.verdict.note}".rstrip())
    return lines


def _noise(report: "Report") -> list[str]:
    """One line for each value that was compared, in each dtype; nothing if no noise was asked for.

    What a value changes by if each of torch's operations is moved by up to a unit in the last place
    stands beside Flax's error, both measured alike; in narrow dtypes torch's own error too.
    """
    rows = [row for row in report.rows if row.verdict.noise is not None and row.kind in MEASURED]
    if not report.noise or not rows:
        return []
    wide = max(len(row.name) for row in rows)
    lines = ["  how much difference is normal here: torch's own rounding noise beside each error"]
    lines.append(f"    {'':<{wide + 20}}  error    noise    torch's own error")
    last = {(row.dtype, row.kind, row.name): row for row in rows}
    return lines + [_line(row, wide) for row in last.values()]


def _line(row: "Row", wide: int) -> str:
    v = row.verdict
    own = "" if v.own is None else f"  {v.own:.1e}"
    return f"    {row.dtype:<9} {row.kind:<9} {row.name:<{wide}}  {v.error:.1e}  {v.noise:.1e}{own}"


def _few(names: tuple[str, ...]) -> str:
    rest = len(names) - MANY
    return ", ".join(names[:MANY]) + (f" and {rest} more" if rest > 0 else "")
