"""Tables for decoding: milliseconds per step, bytes read, and ratios."""

from collections.abc import Sequence
from itertools import groupby

from .cells import Table, bytes_of, span
from .decode import bytes_read
from .result import Row, in_each_run
from .workload import Workload

LIMIT = "cache read once"


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns the ratios of times to this library's, then every figure, from least timings."""
    return [_ratios(rows), _figures(rows)]


def least(row: Row | None) -> float | None:
    """The shortest timing, which is least affected by other work on the machine."""
    return min(row.seconds, default=None) if row else None


def ratio(row: Row | None, of: Row) -> str:
    """Ratio of the least times, `3.1x`, or `2.9x to 3.4x` over several runs."""
    pairs = [(least(a), least(b)) for a, b in in_each_run(row, of)] if row else []
    return span(
        other_value / own_value for other_value, own_value in pairs if other_value and own_value
    )


def races(rows: Sequence[Row]) -> list[tuple[Workload, dict[str, Row]]]:
    """Groups rows by workload, and in each by competitor."""
    by_workload = groupby(rows, key=lambda row: row.workload)
    return [(w, {row.competitor: row for row in race}) for w, race in by_workload]


def of_workload(w: Workload) -> list[str]:
    """The cells that name a workload, below `HEADER`."""
    kind = w.store or (f"ring of {w.window}" if w.window else "")
    stored = str(w.stored) if w.batch == 1 else f"{max(1, w.stored // w.batch)} .. {w.stored}"
    return [str(w.length), stored, str(w.batch), str(w.kv_heads or w.heads), kind or "static"]


HEADER = ["slots", "stored", "B", "K", "cache"]


def _ratios(rows: Sequence[Row]) -> Table:
    names = list(dict.fromkeys(row.competitor for row in rows))
    others = [name for name in names[1:] if name != LIMIT]
    header = [*HEADER, "ms a step", "tokens a second", "read a step", "limit / time", *others]
    lines = []
    for w, race in races(rows):
        of, limit = race.get(names[0]), least(race.get(LIMIT))
        base_time = least(of)
        if of is None or base_time is None:
            continue
        cells = [f"{base_time * 1e3:.3g}", f"{w.batch / base_time:,.0f}", bytes_of(bytes_read(w))]
        cells.append(f"{100 * limit / base_time:.0f} %" if limit else "-")
        other_ratios = [ratio(race.get(name), of) or "-" for name in others]
        lines.append([*of_workload(w), *cells, *other_ratios])
    return Table(f"time over that of {names[0]}: one step of a whole layer", header, lines)


def _figures(rows: Sequence[Row]) -> Table:
    header = ["ratio", "competitor", *HEADER, "ms a step", "median", "memory", "error / limit"]
    lines = []
    for w, race in races(rows):
        of = next(iter(race.values()))
        timed = [row for row in race.values() if row.seconds]
        for row in sorted(timed, key=lambda row: least(row) or 0.0):
            time = least(row) or 0.0
            cells = [ratio(row, of), row.competitor, *of_workload(w)]
            cells += [f"{time * 1e3:.3g}", f"{1e3 * (row.median or 0.0):.3g}"]
            proof = f"{row.proof['error']:.1e} / {row.proof['limit']:.1e}" if row.proof else ""
            proof = "" if row.competitor == LIMIT else proof
            lines.append([*cells, bytes_of(row.temporary), proof])
    return Table("every figure", header, lines)
