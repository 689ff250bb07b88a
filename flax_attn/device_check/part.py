"""A part of the check: its rows, in a file of its own, and its time.

`python -m flax_attn.device_check.part NAME OUT UNTIL` runs one of `MODULES`.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

A = TypeVar("A")
LEFT_OUT = "left out"
NO_TIME = "no time was left"
MACHINE = "machine"  # the file with the device and the versions
PROCESSES = 8  # maximum: each takes some hundred MiB of a GPU's memory
MODULES = {"layers": "replay", "requests": "requests"}


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
      out: folder of its file.
      name: of the part and of its file.
      until: deadline, in seconds since 1970.
      small: whether to use few and small inputs, as on a CPU.
    """

    out: Path
    name: str
    until: float
    small: bool = False

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.until - time.time()

    def write(self, **row: Any) -> None:
        """Appends a row, with the time, to the part's file at once, so that a crash keeps it."""
        row = {**row, "at": round(time.time(), 1)}
        with (self.out / f"{self.name}.jsonl").open("a", encoding="utf-8") as file:
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

    def processes(self) -> int:
        """Number of processes that may compute at once: one on a TPU, which cannot be shared."""
        from ..where import cores

        platform = (rows_of(self.out, MACHINE) or [{}])[0].get("platform", "cpu")
        if platform == "tpu":
            return 1
        return max(1, min(PROCESSES, cores() // 2 if platform == "gpu" else cores()))


def rows_of(out: Path, name: str) -> list[dict[str, Any]]:
    """Reads the rows that a part has written so far; incomplete lines are dropped."""
    file, rows = out / f"{name}.jsonl", []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def facts(_: None = None) -> dict[str, Any]:
    """The machine as in `flax-attn bench`, its devices' number, capability and usable memory."""
    import jax
    import jax.numpy as jnp

    from ..bench.machine import machine
    from ..where import capability_of

    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    capability = capability_of(jnp.zeros(()))
    number = len(jax.devices())
    return {**machine(()), "devices": number, "capability": capability, "memory": memory}


def main() -> None:
    """Runs the part named on the command line; first a process that ends tells the machine."""
    from ..parity.cases.workers import Workers

    name, out, until, *small = sys.argv[1:]
    part = Part(Path(out), name, float(until), bool(small))
    if not rows_of(part.out, MACHINE):
        with Workers() as workers:
            machine: Any = workers.call(facts, None)
        replace(part, name=MACHINE).write(**machine if isinstance(machine, dict) else vars(machine))
    import_module(f".{MODULES[name]}", __package__).run(part)


if __name__ == "__main__":
    main()
