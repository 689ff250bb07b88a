"""Part one: the device, the versions, and the rate of a large matrix product."""

from typing import Any

from ..bench.machine import machine
from ..where import cores
from .task import Task, rows_of

PROCESSES = 8  # maximum: each takes some hundred MiB of a GPU's memory


def run(task: Task) -> None:
    """Writes one row: the machine as in `flax-attn bench`, device count and usable memory."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    dtypes = ("float32",) if task.small else ("float32", "bfloat16")
    task.write(**machine(dtypes), devices=len(jax.devices()), memory=stats.get("bytes_limit"))


def known(task: Task) -> dict[str, Any]:
    """Reads the row of this part for a later one; platform "cpu" if there is none."""
    rows = [row for row in rows_of(task.out, "machine") if "platform" in row]
    return rows[0] if rows else {"platform": "cpu"}


def processes(task: Task) -> int:
    """Number of processes that may compute at once: one on a TPU, which cannot be shared."""
    platform = known(task)["platform"]
    if platform == "tpu":
        return 1
    return max(1, min(PROCESSES, cores() // 2 if platform == "gpu" else cores()))
