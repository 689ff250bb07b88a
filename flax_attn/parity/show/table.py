"""Tables of every comparison, folded by dtype and kind."""

from collections.abc import Sequence

from ..report import Row, badness, plural
from .html import Html, el, join, number, table_of


def tables(rows: Sequence[Row], rewritten: Sequence[str]) -> list[Html]:
    """One fold per dtype and kind, in order of appearance; open if something differs.

    Taps in `rewritten` (their function is equal) do not count as failures.
    """
    return [_fold_rows(*key, group, rewritten) for key, group in _groups(rows).items()]


def summary(rows: Sequence[Row], rewritten: Sequence[str]) -> Html:
    """One line per dtype and kind: the number of comparisons, and the worst of them."""
    heads = ("dtype and kind", "comparisons", "over the limit", "worst error", "limit", "at")
    lines = []
    for key, group in _groups(rows).items():
        worst, off = max(group, key=_rank), len(_over_limit(group, rewritten))
        v = worst.verdict
        cells = [" ".join(filter(None, key)), len(group), f"✕ {off}" if off else 0]
        cells += [number(v.error), number(v.limit), worst.name]
        lines.append((cells, bool(off)))
    return table_of(heads, lines)


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.dtype, row.kind), []).append(row)
    return groups


def _over_limit(rows: Sequence[Row], rewritten: Sequence[str]) -> list[Row]:
    """Rows over their limit, except taps in `rewritten`."""
    over = [row for row in rows if row.verdict.differs]
    return [row for row in over if row.kind != "tap" or row.name not in rewritten]


def _fold_rows(dtype: str, kind: str, rows: list[Row], rewritten: Sequence[str]) -> Html:
    over = [row for row in rows if row.verdict.differs]
    off = _over_limit(rows, rewritten)
    worst = max(rows, key=_rank).verdict
    facts = [plural(len(rows), "comparison")]
    if worst.statement != "exact":
        facts += [f"worst {number(worst.error)}", f"limit {number(worst.limit)}"]
    elif not over:
        facts.append("bit-equal")
    facts += [f"{len(over)} computed another way"] if len(over) > len(off) else []
    return el(
        "details",
        el(
            "summary",
            el("b", " ".join(part for part in (dtype, kind) if part)),
            el("span", ", ".join(facts), class_="quiet"),
            el("span", f"✕ {len(off)} over the limit", class_="off") if off else None,
        ),
        _names(rows) if worst.statement == "exact" and not over else _table(rows),
        open="open" if off and kind != "tap" else None,
    )


def _rank(row: Row) -> float:
    return badness(row.verdict.error)


def _names(rows: list[Row]) -> Html:
    return el("p", ", ".join(dict.fromkeys(row.name for row in rows)), class_="mono wrap")


def _table(rows: list[Row]) -> Html:
    modes = len({row.mode for row in rows}) > 1
    torch_errors = any(row.verdict.other_error is not None for row in rows)
    heads = ["name", *(["mode"] if modes else []), "error", "limit"]
    heads += ["torch's own", "error / own"] if torch_errors else []
    lines = []
    for row in rows:
        v = row.verdict
        cells = [join(["✕ " if v.differs else None, row.name, _more(row)])]
        cells += [row.mode] if modes else []
        cells += [number(v.error), number(v.limit)]
        if torch_errors:
            cells.append("" if v.other_error is None else number(v.other_error))
            cells.append("" if v.ratio is None else f"{v.ratio:.3g}x")
        lines.append((cells, v.differs))
    return table_of(heads, lines)


def _more(row: Row) -> Html | None:
    """The worst element and the note, shown under the name."""
    v = row.verdict
    parts = [part for part in (where(v.index, v.got, v.want), v.note) if part]
    return el("div", "; ".join(parts), class_="more") if parts else None


def where(index: tuple[int, ...] | None, got: float | None, want: float | None) -> str:
    """The worst element with both values, or ""."""
    if index is None:
        return ""
    values = "" if got is None or want is None else f": Flax {got:.9g}, torch {want:.9g}"
    return f"at {list(index)}{values}"
