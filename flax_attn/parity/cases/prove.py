"""Many cases, each in a worker, so that one that ends its process ends nothing else."""

from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..compare import versions
from ..report import Report
from . import golden
from .case import Case
from .collect import Listed, cases_in
from .workers import Failure, Workers


class Job(NamedTuple):
    """One case by its place, since functions in it cannot be sent to a process.

    Attributes:
      listed: its place.
      live: against torch, else against its record.
      eager: whether float64 runs eagerly too.
      seed: in place of the case's own.
    """

    listed: Listed
    live: bool
    eager: bool
    seed: int | None = None

    @property
    def case(self) -> Case:
        """The case itself; its module is imported."""
        case = _cases(self.listed.package, self.listed.module)[self.listed.at]
        if self.seed is not None:
            case = copy(case)
            case.seed = self.seed
        return case


def jobs(cases: Sequence[Listed], live: bool, seed: int | None = None) -> list[Job]:
    """One job a case; the first of each variant and witness runs eagerly too."""
    found, lines = [], set()
    for case in cases:
        line = (case.variant, case.witness)
        found.append(Job(case, live, line not in lines, seed))
        lines.add(line)
    return found


def prove(wanted: Sequence[Job], workers: Workers) -> Iterator[Report]:
    """The reports, in order; of a case that could not be compared, one without comparisons."""
    for job, result in zip(wanted, workers.map(_prove, wanted), strict=True):
        failed = isinstance(result, Failure)
        yield not_proven(job.listed.title, result) if failed else result


def not_proven(title: str, failure: Failure) -> Report:
    """A report of nothing, which is not equal."""
    return Report(title, (), notes=(failure.text,), versions=versions())


def record(
    wanted: Sequence[Job], cases: Sequence[Listed], workers: Workers
) -> Iterator[Path | Failure]:
    """Records torch's results of the jobs' variants, whole; yields the files.

    Args:
      wanted: the jobs.
      cases: all that are known of their packages.
      workers: who records.
    """
    groups: dict[tuple[str, str], list[Listed]] = {
        (job.listed.package, job.listed.variant): [] for job in wanted
    }
    for case in cases:
        groups.get((case.package, case.variant), []).append(case)
    for (_, variant), result in zip(
        groups, workers.map(_record, list(groups.values())), strict=True
    ):
        failed = isinstance(result, Failure)
        yield Failure(f"not recorded: {result.text}", variant) if failed else result


def _prove(job: Job) -> Report:
    return job.case.report(job.live, eager=job.eager)


def _record(cases: Sequence[Listed]) -> Path:
    """Records one variant's cases; what fails is told with the case's name."""
    return golden.record([_cases(case.package, case.module)[case.at] for case in cases])


@lru_cache
def _cases(package: str, module: str) -> list[Case]:
    """The cases of a module, the same objects each time."""
    return cases_in(package, module)
