"""Part four: `flax-attn bench` over lengths and for a decoding step, each verified first."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..bench import decode, functions
from ..bench.competitor import OWN_FAMILY, Competitor
from ..bench.machine import machine
from ..bench.race import Race
from ..bench.result import Results
from ..bench.settings import Settings
from ..bench.table import unfinished
from ..bench.workload import BOTH, FORWARD, Workload
from .facts import known
from .task import Task

NUMBERS = 2**23  # maximum elements of q, since verifying all gradients is slow on the host
FEATURES = 2048  # maximum per token
FLASH, DECODE = "flash", "decode"
OTHERS = ("jax.nn", "torch")
SETTINGS = Settings(rounds=7, seconds=1.0, call=2.0)
Run = tuple[Workload, str]


class TimeIsUp(Exception):
    """Raised when time runs out in the middle of a workload."""


def run(task: Task) -> None:
    """Writes flash.json and decode.json as `flax-attn bench --json` does, row by row."""
    flash_until = task.until - 0.35 * task.seconds_left
    flash = [c for c in functions.flax_attn_competitors(_backends(task)) if c.absent() is None]
    flash += [c for c in functions.others() if c.family in OTHERS and c.absent() is None]
    title = "Attention over lengths"
    _race(replace(task, until=flash_until), FLASH, title, flash, _flash(task.small))
    steps = [
        c for c in decode.competitors() if c.family in (OWN_FAMILY, "torch") and c.absent() is None
    ]
    _race(task, DECODE, "A step of decoding with a cache", steps, _decode(task.small))


def results_of(out: Path, name: str) -> Path:
    """Path of the results of one benchmark."""
    return out / f"{name}.json"


def _backends(task: Task) -> tuple[str, ...]:
    """Backends to time: the automatic choice, then specific ones."""
    return ("auto", "blockwise") if task.small else ("auto", "blockwise", "tokamax")


def _flash(small: bool) -> list[Run]:
    """Workloads and passes, most informative first, since time may be short."""
    if small:
        return [(Workload(n, 32, 2, 1), which) for n in (128, 256) for which in (FORWARD, BOTH)]

    def one(length: int, width: int, mask: str, dtype: str = "bfloat16") -> Workload:
        features = min(FEATURES, NUMBERS // length)
        return Workload(length, width, features // width, max(1, 4096 // length), dtype, mask)

    works = [one(n, 128, "causal") for n in (4096, 16384, 1024)]
    works += [replace(one(16384, 128, "window"), window=1024)]
    works += [one(n, 128, "causal") for n in (32768, 2048, 8192)]
    works += [one(4096, 64, "causal"), one(4096, 128, "full"), one(4096, 128, "causal", "float32")]
    works += [one(n, 64, "causal") for n in (16384, 1024)]
    return [(w, which) for w in works for which in (BOTH, FORWARD)]


def _decode(small: bool) -> list[Run]:
    if small:
        return [(Workload(n, 16, 4, stored=n), FORWARD) for n in (128, 512)]
    works = [Workload(n, 128, 16, stored=n) for n in (8192, 32768, 1024)]
    works += [replace(works[0], kv_heads=4), replace(works[0], batch=8, kv_heads=4)]
    return [(w, FORWARD) for w in works]


def _race(
    task: Task, name: str, title: str, competitors: list[Competitor], works: Sequence[Run]
) -> None:
    facts = known(task)
    results = Results(title, "flax-attn check-device", facts if "device" in facts else machine(()))
    settings = replace(SETTINGS, sets=1) if name == DECODE else SETTINGS
    race = Race(competitors, settings)

    def say(step: str) -> None:
        print(f"{time.strftime('%T')} {step}", flush=True)
        if task.seconds_left <= 0:
            raise TimeIsUp

    for w, which in task.in_time(works, len(works), f"workloads of {title.lower()}"):
        with suppress(TimeIsUp):
            race.run(w, which, results.rows, say)
        results.write(results_of(task.out, name))
    unfinished(results)
    results.complete = True
    results.write(results_of(task.out, name))
