"""Part five: memory of attention, forward and backward, at T and at 2T tokens."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..attend import attend
from ..masks import CAUSAL
from ..parity.cases.workers import Failure, Workers
from .task import Task

WAYS = ("auto", "blockwise", "reference", "jax.nn")
Item = tuple[str, int, int, str]  # way, T, H, dtype


def run(task: Task) -> None:
    """Writes a row for each implementation and length, each computed in a separate process."""
    T, H, dtype = (1024, 16, "float32") if task.small else (8192, 128, "bfloat16")
    items = [(way, n, H, dtype) for way in WAYS for n in (T, 2 * T)]
    for item in task.in_time(items, len(items), "measurements of memory"):
        with Workers() as workers:
            result = workers.call(_measured, item)
        facts = dict(zip(("way", "T", "H", "dtype"), item, strict=True))
        failed = isinstance(result, Failure)
        task.write(**facts, **({"verdict": "failed", "text": result.text} if failed else result))


def _measured(item: Item) -> dict[str, Any]:
    """Bytes of temporary memory of the compiled program, and the device's peak memory."""
    way, T, H, dtype = item
    x = jnp.zeros((1, T, 4, H), dtype)
    attention = (
        partial(jax.nn.dot_product_attention, is_causal=True)
        if way == "jax.nn"
        else partial(attend, mask=CAUSAL, backend=way)
    )

    def both(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> Any:
        out, back = jax.vjp(attention, q, k, v)
        return out, back(cotangent)

    program = jax.jit(both).lower(x, x, x, x).compile()
    memory = program.memory_analysis()
    jax.block_until_ready(program(x, x, x, x))
    stats = jax.devices()[0].memory_stats() or {}
    temporary = None if memory is None else int(memory.temp_size_in_bytes)
    return {"temporary": temporary, "peak": stats.get("peak_bytes_in_use")}
