"""Tables of results: how much each competitor took, its ratio to this library, and how sure it is.

Columns stand in the order of what a reader asks first, so that a narrow terminal shows those on the
left, and files and `--all` show all.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any, NamedTuple

from .result import (
    LIMIT,
    MEASURED,
    MIN_SURE,
    TIMED,
    WRONG,
    Results,
    Row,
    base_of,
    interval,
    is_sure,
    ratios,
)
from .task import label

BRIEF = ("time", "memory", "ratio", "verdict", "interval", "busiest/mean", "sent", "a hop")
# Columns that races need which are measured later.
ROOM = {"time": 7, "memory": 9, "ratio": 8, "verdict": 7, "interval": 18}
MAIN = 4  # columns for which a long name goes over several lines
MAX_MISSING = 8  # tasks that are named after an interrupt
MAX_BUSY_SHARE = 0.5  # of the cores, used by other processes
MIN_KERNEL_TFLOPS = 100.0  # in 16 bits on a GPU: a lower rate means no fused kernel ran


class Race(NamedTuple):
    """One task: the cells that name it, and a line a competitor, its name first, best first."""

    cells: Mapping[str, str]
    lines: list[list[str]]


class Table(NamedTuple):
    """Races below one title, with the headings of their lines.

    Those that a terminal shows first, after the name, are `brief` in number; None for all.
    """

    title: str
    heads: list[str]
    races: list[Race]
    brief: int | None = None

    @property
    def columns(self) -> list[str]:
        """Headings of all cells of a line, those that name the task first."""
        return [*self.races[0].cells, *self.heads]

    @property
    def rows(self) -> list[list[str]]:
        """All cells of each line."""
        return [[*race.cells.values(), *line] for race in self.races for line in race.lines]


def tables(results: Results) -> list[Table]:
    """Returns a table of the races of each group of tasks."""
    by_table: dict[str, list[Row]] = {}
    for row in results.rows:
        by_table.setdefault(row.table, []).append(row)
    every = [_table(title, rows, results.machine) for title, rows in by_table.items()]
    return [table for table in every if table.races]


def _table(title: str, rows: Sequence[Row], machine: Mapping[str, Any]) -> Table:
    races: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.amount is not None or row.status == WRONG:
            races.setdefault(row.race, []).append(row)
    lines = [_ranked(race, machine) for race in races.values()]
    every = [line for race in lines for line in race]
    heads = [head for head in (every[0] if every else ()) if any(line[head] for line in every)]
    shown = [
        Race(race[0].cells, [[line[head] for head in heads] for line in texts])
        for race, texts in zip(races.values(), lines, strict=True)
    ]
    base = next((of.competitor for race in races.values() if (of := base_of(race))), "")
    over = f"{heads[1]} over that of {base}: " if base else ""
    return Table(f"{over}{title}", heads, shown, sum(head in BRIEF for head in heads))


def _ranked(race: Sequence[Row], machine: Mapping[str, Any]) -> list[dict[str, str]]:
    """The cells of each row of a race by heading, from the least amount to the largest."""
    of = base_of(race)
    ranked = sorted(race, key=lambda row: float("inf") if row.amount is None else row.amount)
    lines = [{**_brief(row, of), **_details(row, machine)} for row in ranked]
    best = _surely_best(ranked)
    for row, line in zip(ranked, lines, strict=True):
        line["verdict"] = "fastest" if row is best else line["verdict"]
    return lines


def _surely_best(ranked: Sequence[Row]) -> Row | None:
    """The first of a race, if the ratio of each other competitor to it is surely above 1."""
    timed = [row for row in ranked if row.status == TIMED and row.competitor != LIMIT]
    ends = [interval(row, timed[0]) for row in timed[1:] if is_sure(row, timed[0])]
    every = 0 < len(ends) == len(timed) - 1
    return timed[0] if every and all(end and end[0] > 1.0 for end in ends) else None


def _brief(row: Row, of: Row | None) -> dict[str, str]:
    """What a reader asks first: how much, over ours, whether surely, and how sure."""
    counts, cells = row.figures, {"competitor": row.competitor}
    is_memory = row.status == MEASURED or (of is not None and of.status == MEASURED)
    amount = WRONG if row.status == WRONG else amount_text(row, row.amount)
    cells["memory" if is_memory else "time"] = amount
    cells |= {"ratio": "", "verdict": "", "interval": ""}
    if of is not None and row.amount is not None:
        ends = interval(row, of) if row is not of else None
        cells |= {"ratio": span(ratios(row, of)), "verdict": _verdict(row, of, ends)}
        cells["interval"] = span(ends or ())
    if not is_memory:
        return {**cells, "memory": bytes_of(counts.get("temporary"))}
    busiest = counts["blocks"] / counts["mean"] if "mean" in counts else None
    hop = counts["sent"] / counts["hops"] if "hops" in counts else None
    cells["busiest/mean"] = "" if busiest is None else times(busiest)
    return {**cells, "sent": bytes_of(counts.get("sent")), "a hop": bytes_of(hop)}


def _verdict(row: Row, of: Row, ends: tuple[float, float] | None) -> str:
    """Whether a competitor is surely faster or slower than this library, or neither: level."""
    if row is of or row.competitor == LIMIT:
        return "" if row is of else "bound"
    if ends is None:
        base, amount = of.amount or 0.0, row.amount or 0.0
        return "level" if base == amount else "less" if amount < base else "more"
    verdict = "slower" if ends[0] > 1.0 else "faster" if ends[1] < 1.0 else "level"
    return verdict if verdict == "level" or is_sure(row, of) else f"{verdict}?"


def _details(row: Row, machine: Mapping[str, Any]) -> dict[str, str]:
    """All other figures."""
    counts, peak = row.figures, machine["peak_flops"].get(row.dtype)
    limits, rate = machine.get("limits", {}), row.tflops and row.tflops * 1e12
    proof = "error" in counts and row.competitor != LIMIT
    return {
        "blocks a device": f"{counts['blocks']:,.0f}" if "blocks" in counts else "",
        "median": time_of(median(row.seconds)) if row.by_least and row.seconds else "",
        "quartiles": _between(*row.quartiles) if row.quartiles else "",
        "TFLOP/s": f"{row.tflops:.3g}" if row.tflops else "",
        "of peak": _share(rate, peak),
        "of limit": _share(rate, limits.get("flops")),
        "of bandwidth": _share(row.bandwidth, limits.get("bytes")),
        "compile": time_of(counts.get("compile_seconds")),
        "first call": time_of(counts.get("first_seconds")),
        "backend": row.backend,
        "error / limit": f"{counts['error']:.1e} / {counts['limit']:.1e}" if proof else "",
    }


def _share(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.2g} %" if part and whole else ""


def _between(low: float, high: float) -> str:
    first, last = time_of(low).split(), time_of(high).split()
    return " .. ".join([" ".join(first[:1] if first[1] == last[1] else first), " ".join(last)])


def amount_text(row: Row, amount: float | None) -> str:
    """Formats an amount as the row's: bytes or seconds."""
    return bytes_of(amount) if row.status == MEASURED else time_of(amount)


def times(factor: float) -> str:
    """Formats a ratio with three significant digits.

    >>> times(0.7071), times(12.34), times(1008.4)
    ('0.707x', '12.3x', '1008x')
    """
    return f"{factor:.0f}x" if factor >= 1000 else f"{factor:.3g}x"


def span(factors: Iterable[float]) -> str:
    """Formats the range of several ratios, or a single one.

    >>> span([3.1, 2.9, 3.4]), span([3.1]), span([])
    ('2.9x to 3.4x', '3.1x', '')
    """
    ends = sorted(factors)
    return " to ".join(dict.fromkeys(map(times, [*ends[:1], *ends[-1:]])))


def time_of(seconds: float | None) -> str:
    """Formats seconds in s, ms or us; None gives an empty string.

    >>> time_of(0.0123), time_of(4.5e-5), time_of(12.0)
    ('12.3 ms', '45 us', '12 s')
    """
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_of(count: float | None) -> str:
    """Formats a byte count in MiB, or in KiB below 1 MiB; None gives an empty string."""
    if count is None:
        return ""
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def compared(results: Results, old: Results) -> Table:
    """Table of old time over new time for each row: more than 1 is faster than before."""
    before = {row.key: row.amount for row in old.rows}
    races = []
    for _, group in groupby(results.rows, key=lambda row: row.race):
        lines, cells = [], {}
        for row in group:
            then, now = before.get(row.key), row.amount
            if then is not None and now:
                texts = times(then / now), amount_text(row, then), amount_text(row, now)
                lines.append([row.competitor, *texts])
                cells = {**row.cells, "of": row.table}
        if lines:
            races.append(Race(cells, lines))
    title = "old over new: more than 1 is better than before"
    return Table(title, ["competitor", "ratio", "old", "new"], races)


class Printer:
    """Prints each race once, as soon as it is measured, in lines of at most `width` columns.

    Args:
      say: prints a line.
      width: of the terminal, in columns; None for lines as long as they are, with all columns.
    """

    def __init__(self, say: Callable[[str], object], width: int | None):
        self.say, self.width = say, width
        self._shown: dict[str, int] = {}  # number of races by the title of their table
        self._heads: list[str] = []
        self._sizes: list[int] = []

    def show(self, shown: Iterable[Table]) -> None:
        """Prints the races that were not printed yet."""
        for table in shown:
            new = table.races[self._shown.get(table.title, 0) :]
            begun = table.title in self._shown and self._heads == table.heads
            if new and not (begun and self._fits(new)):
                self._begin(table, new)
            for race in new:
                self._lines([f"\n{label(race.cells)}"])
                for line in race.lines:
                    self._line(line)
            self._shown[table.title] = len(table.races)

    def _begin(self, table: Table, new: Sequence[Race]) -> None:
        """Prints a heading, and chooses the columns that fit; a name goes over several lines."""
        self._heads = table.heads
        lines = [table.heads, *(line for race in new for line in race.lines)]
        size, *sizes = (max(map(len, column)) for column in zip(*lines, strict=True))
        sizes = [max(n, ROOM.get(head, 0)) for n, head in zip(sizes, table.heads[1:], strict=True)]
        if self.width is not None:
            sizes = sizes[: table.brief]
            part = max(len(word) for line in lines for word in _words(line[0]))
            while sizes and self._room(sizes) < (size if len(sizes) > MAIN else part):
                sizes.pop()
            size = max(part, min(size, self._room(sizes)))
        self._sizes = [size, *sizes]
        self._lines([f"\n{table.title}\n"])
        self._line(table.heads)

    def _fits(self, races: Iterable[Race]) -> bool:
        """Whether the columns are wide enough for these races."""
        size, *sizes = self._sizes
        lines = [line for race in races for line in race.lines]
        words = (word.strip() for line in lines for word in _words(line[0]))
        cells = [(cell, n) for line in lines for cell, n in zip(line[1:], sizes, strict=False)]
        return all(len(x) <= size for x in words) and all(len(x) <= n for x, n in cells)

    def _room(self, sizes: Sequence[int]) -> int:
        """Columns that are left for names."""
        return (self.width or 0) - 2 - sum(2 + n for n in sizes)

    def _lines(self, texts: Iterable[str]) -> None:
        """Prints sentences, wrapped at words."""
        for text in texts:
            width = self.width or max(1, len(text))
            for line in wrap(text, width):
                self.say(line)

    def _line(self, cells: Sequence[str]) -> None:
        size, *sizes = self._sizes
        first, *rest = wrap(cells[0], size)
        right = [x.rjust(n) for x, n in zip(cells[1:], sizes, strict=False)]
        self.say("  ".join(["", first.ljust(size), *right]).rstrip())
        for line in rest:
            self.say(f"    {line}")


def _words(text: str) -> list[str]:
    """Parts at whose ends a line may break: after a space, and after a dot inside a name."""
    return re.split(r"(?<=[ ])|(?<=[a-z]\.)(?=[A-Za-z])", text)


def wrap(text: str, width: int) -> list[str]:
    """Breaks a text into lines of at most `width` columns, unless a word is longer than that.

    >>> wrap("jax.nn.dot_product_attention", 22), wrap("torch, growing cache", 14)
    (['jax.nn.', 'dot_product_attention'], ['torch, growing', 'cache'])
    """
    lines = [""]
    for word in _words(text):
        if lines[-1] and len(lines[-1]) + len(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def legend(results: Results) -> str:
    """Says what the columns and verdicts mean."""
    if any(row.status == MEASURED for row in results.rows):
        return "Ratio: memory over that of the line with 1x; less than 1 needs less."
    rows = [row for row in results.rows if row.status == TIMED]
    text = (
        "Ratio: time over that of flax_attn; more than 1 takes longer. Interval: 95 % confidence "
        "interval of the ratio; where it holds 1, level: these rounds do not tell which is faster. "
        "fastest: surely faster than every other line; where no line says so, that is not sure."
    )
    if any(len(row.seconds) < MIN_SURE for row in rows):
        text += (
            f" ?: fewer than {MIN_SURE} rounds, whose interval is only from the lowest to the "
            "highest ratio."
        )
    if any(row.by_least for row in rows):
        text += (
            " Times and ratios of steps are of the least timings, intervals of all. bound: the "
            "time to read as many bytes as the cache has once, a lower limit."
        )
    return text


def remarks(results: Results) -> list[str]:
    """Sentences about what the tables do not show."""
    sentences = [f"{name}: {reason}." for name, reason in results.absent.items()]
    unmeasured: dict[tuple, list[str]] = {}
    for row in results.rows:
        if row.amount is None:
            key = row.competitor, row.status, row.reason
            unmeasured.setdefault(key, []).append(_where(row))
    same: dict[tuple, list[str]] = {}
    for (competitor, status, reason), where in unmeasured.items():
        same.setdefault((status, "; ".join(dict.fromkeys(where)), reason), []).append(competitor)
    for (status, places, reason), names in same.items():
        sentences.append(f"{'; '.join(names)}: {status} at {places}: {reason}.")
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
        if row.competitor == "flax_attn" and _without_kernel(row, results.machine["platform"]):
            sentences.append(
                f"{row.competitor} at {_where(row)}, {row.table}, reaches {row.tflops:.0f} "
                f"TFLOP/s by the backend {row.backend!r}: the plain formula or blocks, and no "
                "kernel; flax_attn.explain tells why."
            )
    return sentences


def _where(row: Row) -> str:
    """Names a task by all that its table does not show for every row."""
    return " ".join(label({k: x for k, x in row.cells.items() if k != "B x N"}).split(", "))


def _interrupted(results: Results) -> str:
    """Sentences about what an interrupted run did not measure."""
    text, missing = "The run was stopped: what was measured before is here.", results.missing
    if not missing:
        return text
    rest = f" and {len(missing) - MAX_MISSING} more" if len(missing) > MAX_MISSING else ""
    return f"{text} Not finished: {'; '.join(missing[:MAX_MISSING])}{rest}."


def _without_kernel(row: Row, platform: str) -> bool:
    if platform != "gpu" or row.dtype == "float32" or row.tflops is None:
        return False
    return row.tflops < MIN_KERNEL_TFLOPS
