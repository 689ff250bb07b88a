"""Programs run one after the other, in this process or in several."""

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import jax

from .backends import strict
from .runs import run

Line = dict[str, Any]


def prepare() -> None:
    """What a process needs before it runs programs, most of which compile once and never again."""
    strict()
    jax.config.update("jax_enable_compilation_cache", False)


def outcomes(
    seeds: list[int], requests: int | None, jobs: int, minutes: float | None
) -> Iterator[Line]:
    """The line of each seed, as they end; none is begun after so many minutes."""
    end = time.monotonic() + 60 * (1e6 if minutes is None else minutes)
    left = iter(seeds)
    if jobs == 1:
        for seed in left:
            if time.monotonic() > end:
                return
            yield one(seed, requests)
        return
    # New processes now and then: what is compiled stays in memory.
    workers = ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=prepare, max_tasks_per_child=150
    )
    with workers:
        running: set[Future] = set()
        while True:
            while len(running) < jobs and time.monotonic() < end:
                seed = next(left, None)
                if seed is None:
                    break
                running.add(workers.submit(one, seed, requests))
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def one(seed: int, requests: int | None) -> Line:
    """One program, in whatever process."""
    line = run(seed, requests).line()
    if seed % 10 == 0:
        jax.clear_caches()
    return line
