"""Results: a row for each competitor, workload and pass, written to and read from JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from .workload import Workload

FORMAT = "flax-attn bench, format 1"
TIMED, WRONG, LEFT_OUT, MEASURED = "timed", "wrong", "left out", "measured"


@dataclass
class Row:
    """One competitor on one workload in one pass.

    Attributes:
      workload, which: the workload and the pass.
      competitor: its name; `family` is its name for `--against`.
      backend: this library's backend that ran, "" for others.
      status: "timed", "measured" (memory only), "wrong" (not timed) or "left out".
      reason: why it was not timed, or a remark.
      proof: the worst error and its limit, from `parity.judge`.
      compile_seconds, first_seconds: duration of compilation and of the first call.
      temporary: bytes of temporary memory of the compiled program, or None if unknown.
      seconds: every timing, in order.
      counts: for several devices, "blocks" of the busiest one, their "mean", and bytes "sent".
      runs: the same row in each of several runs, if this row merges them.
    """

    workload: Workload
    which: str
    competitor: str
    family: str
    backend: str = ""
    status: str = LEFT_OUT
    reason: str = ""
    proof: dict[str, float] | None = None
    compile_seconds: float | None = None
    first_seconds: float | None = None
    temporary: int | None = None
    seconds: list[float] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    runs: list["Row"] = field(default_factory=list)

    @property
    def key(self) -> tuple[Workload, str, str]:
        """Identifies the row within a run."""
        return self.workload, self.which, self.competitor

    @property
    def median(self) -> float | None:
        """The median of the timings, in seconds."""
        return median(self.seconds) if self.seconds else None

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
        flops = self.workload.flops(self.which)
        return flops / self.median / 1e12 if self.median and flops else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second, if every tensor is moved once."""
        return self.workload.bytes(self.which) / self.median if self.median else None

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain values, including statistics of the timings."""
        return {
            **asdict(replace(self, runs=[])),
            "median_seconds": self.median,
            "quartiles_seconds": self.quartiles,
            "least_seconds": min(self.seconds, default=None),
            "tflops": self.tflops,
            "bytes_a_second": self.bandwidth,
        }


@dataclass
class Results:
    """All rows of one run, and the machine it ran on.

    Attributes:
      title, command: of the run.
      machine: its machine and versions.
      rows: a row for each competitor, workload and pass.
      absent: why competitors could not run, by family.
      complete: whether the run came to its end.
      missing: workloads and passes that an interrupted run did not finish.
    """

    title: str
    command: str
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    missing: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Writes the results as JSON."""
        rows = [row.to_dict() for row in self.rows]
        document = {"format": FORMAT, **asdict(self), "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def read(path: Path) -> Results:
    """Reads results written by `Results.write`.

    Raises:
      ValueError: if there is no such file, or it has other contents.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file that flax-attn bench wrote.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by flax-attn bench ({FORMAT!r} is missing).")
    try:
        results = Results(document["title"], document["command"], document["machine"])
        results.rows = [_row(row) for row in document["rows"]]
        results.absent, results.complete = dict(document["absent"]), bool(document["complete"])
        results.missing = [*document.get("missing", ())]  # older files have none
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has rows that flax-attn bench did not write.") from error
    return results


def _row(fields: dict[str, Any]) -> Row:
    if "contender" in fields:  # the field's name in the last release
        fields = {**fields, "competitor": fields["contender"]}
    known = {name: fields[name] for name in Row.__dataclass_fields__ if name in fields}
    return Row(**{**known, "workload": Workload(**fields["workload"])})


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


def in_each_run(row: Row, of: Row) -> list[tuple[Row, Row]]:
    """Pairs both rows run by run, or as they are if they merge no runs."""
    return [*zip(row.runs, of.runs, strict=True)] if row.runs and of.runs else [(row, of)]


def _joined(rows: Sequence[Row | None]) -> Row:
    timed = [row for row in rows if row is not None and row.status == TIMED]
    if len(timed) < len(rows):
        return next(row for row in reversed(rows) if row is not None)
    seconds = [second for row in timed for second in row.seconds]
    return replace(timed[-1], seconds=seconds, runs=timed)
