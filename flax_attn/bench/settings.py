"""Benchmark settings: rounds, time and memory limits."""

from dataclasses import dataclass

import jax
import numpy as np


@dataclass(frozen=True)
class Settings:
    """Limits of one run.

    Attributes:
      rounds: maximum number of timings per competitor.
      seconds: approximate limit for timing all competitors of a workload; the first three rounds
        always run.
      call: longest single call in seconds; a competitor expected to take longer is left out.
      sets: number of sets of inputs, used in turn.
      timed: whether anything is timed; else only the compiled program's memory is reported.
    """

    rounds: int = 15
    seconds: float = 2.0
    call: float = 3.0
    sets: int = 2
    timed: bool = True


MIN_ROUNDS = 3


def available_memory() -> float:
    """Bytes that a competitor may use: most of the free memory, of the accelerator if present."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return 0.9 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 0.8 * 1024 * float(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux: unknown
        return np.inf
