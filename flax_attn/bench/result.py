"""Results: a row for each competitor and task, written to and read from JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import comb
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .task import Task

FORMAT = "flax-attn bench, format 2"
TIMED, WRONG, LEFT_OUT, MEASURED = "timed", "wrong", "left out", "measured"
LIMIT = "cache read once"  # a lower bound of a step of decoding, and no competitor
MIN_SURE = 6  # rounds: of fewer an interval is only their range
OUTSIDE = 0.025  # of all intervals, those that the median is below, and those that it is above


@dataclass
class Row:
    """One competitor on one task.

    Attributes:
      table: what the tasks of one table share, in words.
      cells: what tells the task from others of its table, by heading, with its "pass".
      competitor: its name; `family` is its name for `--against`.
      dtype: of the task.
      by_least: whether its time is the least of its timings, and not their median.
      backend: this library's backend that ran, "" for others.
      status: "timed", "measured" (memory only), "wrong" (not timed) or "left out".
      reason: why it was not timed, or a remark.
      seconds: every timing, in order.
      figures: by name, those that are known of "flops" and "bytes" of the task, "error" and "limit"
        (the worst error and its limit, from `parity.judge`), "compile_seconds", "first_seconds" (of
        the first call), "temporary" (bytes of the compiled program) and, of several devices,
        "blocks" of the busiest one, their "mean", bytes "sent" and "hops".
      runs: the same row in each of several runs, if this row merges them.
    """

    table: str
    cells: dict[str, str]
    competitor: str
    family: str
    dtype: str = "float32"
    by_least: bool = False
    backend: str = ""
    status: str = LEFT_OUT
    reason: str = ""
    seconds: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    runs: list["Row"] = field(default_factory=list)

    @classmethod
    def of(cls, task: Task, competitor: str, family: str) -> "Row":
        """Begins the row of a competitor."""
        row = cls(task.table, task.cells, competitor, family, task.dtype, task.by_least)
        row.note(flops=task.flops or None, bytes=task.bytes)
        return row

    def note(self, **figures: float | None) -> None:
        """Adds the figures that are known."""
        self.figures |= {name: x for name, x in figures.items() if x is not None}

    @property
    def key(self) -> tuple:
        """Identifies the row within a run."""
        return self.race, self.competitor

    @property
    def race(self) -> tuple:
        """Identifies the task."""
        return self.table, *self.cells.items()

    @property
    def amount(self) -> float | None:
        """What ratios compare: seconds, or bytes if nothing was timed; None if it has none."""
        if self.status == MEASURED:
            return self.figures.get("temporary")
        if self.status != TIMED or not self.seconds:
            return None
        return min(self.seconds) if self.by_least else median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the timings, in seconds."""
        if not self.seconds:
            return None
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def tflops(self) -> float | None:
        """TFLOP/s, counting visible pairs only."""
        flops = self.figures.get("flops")
        return flops / median(self.seconds) / 1e12 if self.seconds and flops else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, if every tensor is moved once."""
        return self.figures["bytes"] / median(self.seconds) if self.seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values, including statistics of the timings."""
        return {
            **asdict(replace(self, runs=[])),
            "median_seconds": median(self.seconds) if self.seconds else None,
            "quartiles_seconds": self.quartiles,
            "least_seconds": min(self.seconds, default=None),
            "tflops": self.tflops,
            "bytes_a_second": self.bandwidth,
        }


def ratios(row: Row, of: Row) -> list[float]:
    """A row's amount over another's, in each run of both."""
    amounts = [(a.amount, b.amount) for a, b in _in_each_run(row, of)]
    return [a / b for a, b in amounts if a is not None and b]


def interval(row: Row, of: Row) -> tuple[float, float] | None:
    """Interval of the ratio of times: 95 % for the median of a round's ratios; None for memory.

    Competitors are timed in turns, so that each round gives a ratio. Of n sorted ratios, the median
    of all possible rounds lies between the r-th and the r-th from the end, unless fewer than r of n
    fell on one side of it, as heads do in n tosses. With fewer than `MIN_SURE` rounds it is their
    whole range. Of several runs it is the range of their intervals.
    """
    ends = []
    for a, b in _in_each_run(row, of):
        rounds = sorted(x / y for x, y in zip(a.seconds, b.seconds, strict=False))
        if rounds and a.amount and b.amount:
            rank = _rank(len(rounds))
            ends += [rounds[rank], rounds[-1 - rank], a.amount / b.amount]
    return (min(ends), max(ends)) if ends else None


def is_sure(row: Row, of: Row) -> bool:
    """Whether each run has as many rounds of both as an interval needs."""
    return all(min(len(a.seconds), len(b.seconds)) >= MIN_SURE for a, b in _in_each_run(row, of))


def _rank(n: int) -> int:
    """Number of ratios to leave out at each end."""
    rank, below = 0, 1.0
    while below <= OUTSIDE * 2**n:
        rank += 1
        below += comb(n, rank)
    return max(0, rank - 1)


def base_of(rows: Sequence[Row]) -> Row | None:
    """This library's row of one task, preferring its own choice of backend."""
    mine = [row for row in rows if row.family == "flax_attn" and row.amount]
    return next((row for row in mine if row.competitor == "flax_attn"), mine[0] if mine else None)


@dataclass
class Results:
    """All rows of one run, and the machine it ran on.

    Attributes:
      title, command: of the run.
      machine: its machine and versions.
      rows: a row for each competitor and task.
      absent: why competitors could not run, by family.
      complete: whether the run came to its end.
      missing: tasks that an interrupted run did not finish.
      wanted: number of tasks that the run was to do; 0 if it is not known.
    """

    title: str
    command: str
    machine: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    missing: list[str] = field(default_factory=list)
    wanted: int = 0

    def write(self, path: Path) -> None:
        """Writes the results as JSON."""
        rows = [row.to_dict() for row in self.rows]
        document = {"format": FORMAT, **asdict(self), "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")

    def stop(self) -> None:
        """Marks the rows that an interrupt left without a figure."""
        for row in self.rows:
            unfinished = row.status == LEFT_OUT and not row.reason
            if unfinished or (row.status == TIMED and not row.seconds):
                row.status, row.reason = LEFT_OUT, "stopped before it was measured"


def together(runs: Sequence[Results]) -> Results:
    """Merges runs of one command: each row has the timings of all, and its `runs`.

    A row that is not timed in every run is taken unchanged from the last run that contains it.

    Raises:
      ValueError: if the runs differ in command, machine or versions.
    """
    last = runs[-1]
    for run in runs[:-1]:
        one, other = ({"command": x.command, **x.machine} for x in (run, last))
        for name in ("command", "processor", "device", "cores", "versions"):
            if one[name] != other[name]:
                what = f"{name} was {one[name]}, and is {other[name]}"
                raise ValueError(f"these runs do not belong together: {what}.")
    by_key = [{row.key: row for row in run.rows} for run in runs]
    rows = [_joined([rows.get(row.key) for rows in by_key]) for row in last.rows]
    machine = {**last.machine, "runs": [run.machine for run in runs]}
    complete = all(run.complete for run in runs)
    return replace(last, machine=machine, rows=rows, complete=complete)


def _in_each_run(row: Row, of: Row) -> list[tuple[Row, Row]]:
    """Pairs both rows run by run, or as they are if they merge no runs."""
    return [*zip(row.runs, of.runs, strict=True)] if row.runs and of.runs else [(row, of)]


def _joined(rows: Sequence[Row | None]) -> Row:
    timed = [row for row in rows if row is not None and row.status == TIMED]
    if len(timed) < len(rows):
        return next(row for row in reversed(rows) if row is not None)
    seconds = [second for row in timed for second in row.seconds]
    return replace(timed[-1], seconds=seconds, runs=timed)
