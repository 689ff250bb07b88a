"""How a benchmark is run: rounds, time, and what may be tried."""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Settings:
    """Limits of one run.

    Attributes:
      rounds: how often each competitor is timed, at most.
      seconds: how long one row of competitors may be timed, about; the first three rounds are run
        in any case.
      call: the longest single call; a competitor that is expected to take longer is left out.
      sets: how many sets of inputs take turns.
      timed: whether anything is timed; else only the memory of the compiled program is asked.
    """

    rounds: int = 15
    seconds: float = 2.0
    call: float = 3.0
    sets: int = 2
    timed: bool = True


MIN_ROUNDS = 3


def available_memory() -> float:
    """Bytes that a competitor may fill: most of what is free, of the accelerator if there is one."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return 0.9 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 0.8 * 1024 * float(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # no Linux: nothing is known
        return np.inf
