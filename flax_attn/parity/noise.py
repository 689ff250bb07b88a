"""Torch's own rounding noise beside every error: how much difference is normal here."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report, Row

KINDS = ("tap", "output", "gradient")


def table(report: "Report") -> list[str]:
    """One line for each value that was compared, in each dtype; nothing if no noise was asked for.

    What a value changes by if each of torch's operations is moved by up to a unit in the last place
    stands beside Flax's error, both measured alike; in narrow dtypes torch's own error too.
    """
    rows = [row for row in report.rows if row.verdict.noise is not None and row.kind in KINDS]
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
