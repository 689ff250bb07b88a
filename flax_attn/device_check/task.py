"""The task of a part of the check, and the rows that it writes to its file."""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

A = TypeVar("A")
LEFT_OUT = "left out"
NO_TIME = "no time was left"


@dataclass(frozen=True)
class Task:
    """One part of the check.

    Attributes:
      out: folder of its file.
      part: name of the part and of its file.
      until: deadline, in seconds since 1970.
      small: whether to use few and small inputs, as on a CPU.
    """

    out: Path
    part: str
    until: float
    small: bool = False

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.until - time.time()

    def write(self, **row: Any) -> None:
        """Appends a row, with the time, to the part's file at once, so that a crash keeps it."""
        row = {**row, "at": round(time.time(), 1)}
        with file_of(self.out, self.part).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def leave_out(self, what: str, reason: str = NO_TIME) -> None:
        """Appends a row for what was not run, and why."""
        self.write(verdict=LEFT_OUT, what=what, reason=reason)

    def in_time(self, items: Iterable[A], total: int, what: str) -> Iterator[A]:
        """Yields items until the deadline, then writes how many of `total` were left out."""
        done = 0
        for item in items:
            yield item
            done += 1
            if done < total and self.seconds_left <= 0:
                self.leave_out(f"{total - done} of {total} {what}")
                return


def file_of(out: Path, part: str) -> Path:
    """Path of a part's rows, one JSON object per line."""
    return out / f"{part}.jsonl"


def rows_of(out: Path, part: str) -> list[dict[str, Any]]:
    """Reads the rows that a part has written so far; incomplete lines are dropped."""
    file, rows = file_of(out, part), []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
