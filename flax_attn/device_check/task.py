"""What a part of the check is given, and the rows that it leaves in its file."""

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
      out: the folder that its file goes to.
      part: its name, and the name of its file.
      until: when it must have ended, in seconds since 1970.
      small: whether few and small inputs are wanted, as on a CPU.
    """

    out: Path
    part: str
    until: float
    small: bool = False

    @property
    def seconds_left(self) -> float:
        """How long it may still run."""
        return self.until - time.time()

    def write(self, **row: Any) -> None:
        """Adds a row, with the time, to the part's file, where it stays whatever comes next."""
        row = {**row, "at": round(time.time(), 1)}
        with file_of(self.out, self.part).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def leave_out(self, what: str, reason: str = NO_TIME) -> None:
        """Adds a row that says what was not tried, and why."""
        self.write(verdict=LEFT_OUT, what=what, reason=reason)

    def in_time(self, items: Iterable[A], total: int, what: str) -> Iterator[A]:
        """The items until the time is over; then a row says how many of `total` were left out."""
        done = 0
        for item in items:
            yield item
            done += 1
            if done < total and self.seconds_left <= 0:
                self.leave_out(f"{total - done} of {total} {what}")
                return


def file_of(out: Path, part: str) -> Path:
    """The file of a part's rows: one JSON object a line."""
    return out / f"{part}.jsonl"


def rows_of(out: Path, part: str) -> list[dict[str, Any]]:
    """What a part has left so far; a line that was cut off is dropped."""
    file, rows = file_of(out, part), []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
