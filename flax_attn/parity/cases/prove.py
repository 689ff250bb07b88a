"""Many cases, in as many processes as there are processors; an accelerator is used by one."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import jax

from ...errors import ParityError
from ..compare import versions
from ..report import Report
from . import golden
from .case import Case, has_torch
from .collect import collect


class Job(NamedTuple):
    """One case by its package and place there, since functions in it cannot be sent to a process.

    `live`: against torch, else against its record. `eager`: whether float64 runs eagerly too.
    """

    package: str
    at: int
    live: bool
    eager: bool

    @property
    def case(self) -> Case:
        """The case itself."""
        return _collected(self.package)[self.at]


def jobs(package: str, cases: Sequence[Case], live: bool) -> list[Job]:
    """One job a case of a package; the first of each variant and witness runs eagerly too."""
    found, lines = [], set()
    for at, case in enumerate(_collected(package)):
        if case in cases:
            line = (case.variant, case.witness)
            found.append(Job(package, at, live, line not in lines))
            lines.add(line)
    return found


def prove(wanted: Sequence[Job]) -> Iterator[Report]:
    """The reports, in order."""
    return _spread(_prove, wanted)


def record(wanted: Sequence[Job]) -> Iterator[Path]:
    """Records torch's results of the jobs' variants, whole; yields the files."""
    groups = dict.fromkeys((job.package, job.case.variant) for job in wanted)
    return _spread(_record, list(groups))


def cases_of(package: str) -> list[Case]:
    """The cases of a package, the same objects each time."""
    return _collected(package)


@lru_cache
def _collected(package: str) -> list[Case]:
    return collect(package)


def _prove(job: Job) -> Report:
    """The report; where it could not be made, a report of nothing, which is not equal."""
    case = job.case
    try:
        return case.report(job.live, eager=job.eager)
    except ParityError as error:
        return Report(str(case), (), notes=(str(error),), versions=versions())


def _record(group: tuple[str, str]) -> Path:
    package, variant = group
    return golden.record([case for case in _collected(package) if case.variant == variant])


def _spread(work, items):
    """`work` over `items`, in order; in processes where that pays."""
    count = min(os.cpu_count() or 1, len(items) // 2)
    if count < 2 or jax.default_backend() != "cpu":
        yield from map(work, items)
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start)
    try:
        yield from pool.map(work, items)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def _start() -> None:
    """One thread a process for torch, so that processes do not fight for processors."""
    if has_torch():
        import torch

        torch.set_num_threads(1)
