"""Tables of results as plain cells, ratios first, for the terminal and the page."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from . import scale, steps
from .cells import Table, bytes_of, span, time_of, times
from .result import LEFT_OUT, MEASURED, TIMED, Results, Row, in_each_run
from .workload import DELTA, LAYER, Workload

MAX_COLUMNS = 8
MAX_MISSING = 8  # workloads that are named after an interrupt
MAX_BUSY_SHARE = 0.5  # of the cores, used by other processes
MIN_KERNEL_TFLOPS = 100.0  # in 16 bits on a GPU: a lower rate means no fused kernel ran


def tables(results: Results) -> list[Table]:
    """Returns ratios for each group of shapes, then every figure."""
    if any(row.workload.stored for row in results.rows):
        return [table for table in steps.tables(results.rows) if table.rows]
    if any(row.workload.devices for row in results.rows):
        return [table for table in scale.tables(results.rows) if table.rows]
    all_tables = [t for group in _groups(results.rows) for t in _ratios(group, results)]
    all_tables += [_details(group, results) for group in _groups(results.rows)]
    return [table for table in all_tables if table.rows]


def split(all_tables: Sequence[Table]) -> tuple[list[Table], list[Table]]:
    """Splits into ratios and figures; without ratios, the figures come first."""
    ratios = [table for table in all_tables if table.header[0] != "ratio"]
    figures = [table for table in all_tables if table.header[0] == "ratio"]
    return (ratios, figures) if ratios else (figures, [])


def value(row: Row) -> float | None:
    """The value that ratios compare: the median time, or bytes if nothing was timed."""
    if row.status == MEASURED:
        return None if row.temporary is None else float(row.temporary)
    return row.median if row.status == TIMED else None


def base(rows: Iterable[Row]) -> Row | None:
    """This library's row for one workload and pass, preferring its own choice of backend."""
    mine = [row for row in rows if row.family == "flax_attn" and value(row)]
    return next((row for row in mine if row.competitor == "flax_attn"), mine[0] if mine else None)


def ratio(row: Row, of: Row | None) -> str:
    """Ratio to this library's value: `3.1x`, or `2.9x to 3.4x` over several runs."""
    if of is None:
        return ""
    pairs = [(value(a), value(b)) for a, b in in_each_run(row, of)]
    return span(other / base for other, base in pairs if other is not None and base)


def _group_of(w: Workload) -> tuple:
    return w.layer or "", w.dtype, w.describe_mask, w.width, w.heads if w.layer == DELTA else 0


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    first: dict[tuple, list[Row]] = {}
    for row in rows:
        first.setdefault(_group_of(row.workload), []).append(row)
    return list(first.values())


def heading(w: Workload) -> str:
    """Describes what the workloads of one group share."""
    if w.layer == DELTA:
        return f"{w.layer}, {w.heads} heads of width {w.width}, {w.dtype}"
    if w.layer not in (None, LAYER):
        return f"{w.layer}, width {w.features}, {w.dtype}"
    what = f"whole layer, width {w.features}" if w.layer else f"head width {w.width}"
    devices = f", {w.devices} devices" if w.devices else ""
    return f"{what}, {w.describe_mask}, {w.dtype}{devices}"


def races(rows: Sequence[Row]) -> list[list[Row]]:
    """Groups rows by workload and pass."""
    return [list(g) for _, g in groupby(rows, key=lambda row: row.key[:2])]


def _ratios(group: Sequence[Row], results: Results) -> list[Table]:
    names = list(dict.fromkeys(row.competitor for row in group))
    if len(names) > MAX_COLUMNS or not any(base(race) for race in races(group)):
        return []
    bases = [reference.competitor for race in races(group) if (reference := base(race))]
    shown = [name for name in names if name != bases[0]]
    rows = []
    for race in races(group):
        w, of = race[0].workload, base(race)
        by_name = {row.competitor: ratio(row, of) for row in race}
        cells = [
            str(w.length),
            f"{w.batch} x {w.heads}",
            race[0].which,
            cell(of),
            _peak(of, results),
        ]
        rows.append([*cells, *(by_name.get(name) or "-" for name in shown)])
    what = "memory" if group[0].status == MEASURED else "time"
    title = f"{what} over that of {bases[0]}: {heading(group[0].workload)}"
    return [_filled(Table(title, ["T", "B x N", "pass", bases[0], "of peak", *shown], rows))]


def _peak(row: Row | None, results: Results) -> str:
    """A row's FLOP/s as a share of the measured matmul peak."""
    peak = results.machine["peak_flops"].get(row.workload.dtype) if row else None
    return _share(row.tflops and row.tflops * 1e12, peak) if row else ""


def _filled(table: Table) -> Table:
    """Removes empty columns."""
    used = [i for i in range(len(table.header)) if any(cells[i] for cells in table.rows)]
    rows = [[cells[i] for i in used] for cells in table.rows]
    return Table(table.title, [table.header[i] for i in used], rows)


def cell(row: Row | None) -> str:
    """Formats the time of a row, or its bytes."""
    if row is None or value(row) is None:
        return "-"
    return bytes_of(row.temporary) if row.status == MEASURED else time_of(row.median)


def _details(group: Sequence[Row], results: Results) -> Table:
    header = ["ratio", "competitor", "T", "pass", "median", "quartiles", "TFLOP/s", "of peak"]
    limits = results.machine.get("limits")
    header += ["of limit", "of bandwidth"] if limits else []
    header += ["memory", "compile", "first call", "backend", "error / limit"]
    rows = []
    for race in races(group):
        of = base(race)
        entries = [row for row in race if value(row) is not None]
        for row in sorted(entries, key=lambda row: value(row) or 0.0):
            rows.append(_detail(row, ratio(row, of), results))
    return _filled(Table(f"every figure: {heading(group[0].workload)}", header, rows))


def _detail(row: Row, by: str, results: Results) -> list[str]:
    w, machine = row.workload, results.machine
    flops = row.tflops
    quartiles = _between(*row.quartiles) if row.quartiles else ""
    cells = [by, row.competitor, str(w.length), row.which, time_of(row.median), quartiles]
    cells += [f"{flops:.3g}" if flops else "", _peak(row, results)]
    if machine.get("limits"):
        cells += [_share(flops and flops * 1e12, machine["limits"]["flops"])]
        cells += [_share(row.bandwidth, machine["limits"]["bytes"])]
    proof = f"{row.proof['error']:.1e} / {row.proof['limit']:.1e}" if row.proof else ""
    cells += [bytes_of(row.temporary), time_of(row.compile_seconds), time_of(row.first_seconds)]
    return [*cells, row.backend, proof]


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.2g} %" if part and whole else ""


def _between(low: float, high: float) -> str:
    first, last = time_of(low).split(), time_of(high).split()
    return " .. ".join([" ".join(first[:1] if first[1] == last[1] else first), " ".join(last)])


def _where(row: Row) -> str:
    w = row.workload
    return f"({w})" if w.stored or w.devices else f"T {w.length} {row.which}"


def remarks(results: Results) -> list[str]:
    """Sentences about what the tables do not show."""
    sentences = [f"{name}: {reason}." for name, reason in results.absent.items()]
    unmeasured: dict[tuple, list[str]] = {}
    for row in results.rows:
        if value(row) is None:
            key = row.competitor, row.status, row.reason
            unmeasured.setdefault(key, []).append(_where(row))
    for (competitor, status, reason), where in unmeasured.items():
        places = ", ".join(dict.fromkeys(where))
        sentences.append(f"{competitor}, {status} at {places}: {reason}.")
    if not results.complete:
        sentences.append(_interrupted(results))
    load, cores = results.machine.get("load"), results.machine.get("cores")
    if load and cores and load > MAX_BUSY_SHARE * cores:
        sentences.append(
            f"Other work ran when this began (load {load:.1f} on {cores} cores): trust the ratios "
            "before the times."
        )
    if results.machine.get("compilation_cache"):
        sentences.append("A compilation cache is set: compile times may be those of reading it.")
    for row in results.rows:
        if row.competitor == "flax_attn" and _kernel_warning(row, results.machine["platform"]):
            sentences.append(
                f"{row.competitor} at {row.workload}, {row.which}, reaches {row.tflops:.0f} "
                f"TFLOP/s by the backend {row.backend!r}: the plain formula or blocks, and no "
                "kernel; flax_attn.explain tells why."
            )
    return sentences


def _interrupted(results: Results) -> str:
    """Sentences about what an interrupted run did not measure."""
    text, missing = "The run was stopped: what was measured before is here.", results.missing
    if not missing:
        return text
    rest = f" and {len(missing) - MAX_MISSING} more" if len(missing) > MAX_MISSING else ""
    return f"{text} Not finished: {'; '.join(missing[:MAX_MISSING])}{rest}."


def _kernel_warning(row: Row, platform: str) -> bool:
    if platform != "gpu" or row.workload.dtype == "float32" or row.tflops is None:
        return False
    return row.tflops < MIN_KERNEL_TFLOPS


def compared(results: Results, old: Results) -> Table:
    """Table of old time over new time for each row: more than 1 is faster than before."""
    before = {row.key: value(row) for row in old.rows}
    rows = []
    for row in results.rows:
        then, now = before.get(row.key), value(row)
        if then is not None and now:
            name = [times(then / now), row.competitor, str(row.workload), row.which]
            rows.append([*name, _amount_text(row, then), cell(row)])
    return Table(
        "old over new: more than 1 is better than before",
        ["ratio", "competitor", "workload", "pass", "old", "new"],
        rows,
    )


def _amount_text(row: Row, amount: float) -> str:
    return bytes_of(int(amount)) if row.status == MEASURED else time_of(amount)


def unfinished(results: Results) -> None:
    """Marks the rows that an interrupt left without a figure."""
    for row in results.rows:
        if (row.status == TIMED and not row.seconds) or (row.status == LEFT_OUT and not row.reason):
            row.status, row.reason = LEFT_OUT, "stopped before it was measured"
