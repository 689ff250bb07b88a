"""Part one: the device, the versions, and the rate of a large matrix product."""

from typing import Any

from ..backends.platform import cores
from ..bench.machine import machine
from .task import Task, rows_of

PROCESSES = 8  # at most: each holds some hundred MiB of a GPU's memory


def run(task: Task) -> None:
    """Writes one row: what `flax-attn bench` says of a machine, and the share of memory free."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    dtypes = ("float32",) if task.small else ("float32", "bfloat16")
    task.write(**machine(dtypes), devices=len(jax.devices()), memory=stats.get("bytes_limit"))


def known(task: Task) -> dict[str, Any]:
    """The row of this part, read by a later one; "cpu" if it has left none."""
    rows = [row for row in rows_of(task.out, "machine") if "platform" in row]
    return rows[0] if rows else {"platform": "cpu"}


def processes(task: Task) -> int:
    """How many processes may compute at once: a TPU belongs to one."""
    platform = known(task)["platform"]
    if platform == "tpu":
        return 1
    return max(1, min(PROCESSES, cores() // 2 if platform == "gpu" else cores()))
