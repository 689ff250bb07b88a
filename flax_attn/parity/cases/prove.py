"""Runs many cases in worker processes, so that a crash affects only one case."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..report import Report
from .collect import Listed, cases_in
from .strict import strict
from .workers import Failure, Workers

if TYPE_CHECKING:  # importing Case imports jax, which only workers need
    from .case import Case

# From the simplest attention to the layer of current models.
CLIMB = (
    "simplified_self_attention",
    "self_attention_v1",
    "self_attention_v2",
    "causal_attention",
    "multi_head_wrapper",
    "multi_head",
    "grouped_query",
)
# Run if no names are given: the climb, and one layer of every other kind.
FIXED = (
    *CLIMB,
    "transformer_multi_head",
    "latent",
    "cross",
    "t5",
    "disentangled",
    "window",
    "longformer",
    "axial",
    "class_attention",
    "cross_covariance",
    "differential",
    "talking_heads",
    "value_residual",
    "sigmoid",
    "entmax",
    "selective",
    "linear",
    "lightning",
    "mamba",
    "mamba2",
    "luong",
    "causal_renormalised",
    "uniform_causal_average",
    "single_head",
)
# The reference whose first case is used; other variants use their first case.
ORIGINALS = {"transformer_multi_head": "torch.nn.MultiheadAttention"}
SHORT = "float64"  # the only dtype of the fixed set


class Job(NamedTuple):
    """One case by its position, since cases contain functions that cannot be pickled.

    Attributes:
      listed: its position.
      live: whether to compare with torch, else with its record.
      eager: whether float64 also runs eagerly.
      seed: replaces the case's own.
      short: whether to run one dtype only.
    """

    listed: Listed
    live: bool
    eager: bool
    seed: int | None = None
    short: bool = False

    @property
    def case(self) -> "Case":
        """The case itself; imports its module."""
        case = copy(_cases(self.listed.package, self.listed.module)[self.listed.at])
        if self.seed is not None:
            case.seed = self.seed
        if self.short:
            case.dtypes = (SHORT,) if SHORT in case.dtypes else case.dtypes[:1]
        return case


def jobs(cases: Sequence[Listed], live: bool, seed: int | None = None) -> list[Job]:
    """One job per case; the first of each variant and reference also runs eagerly."""
    queue, lines = [], set()
    for case in cases:
        line = (case.variant, case.reference)
        queue.append(Job(case, live, line not in lines, seed))
        lines.add(line)
    return queue


def short(wanted: Sequence[Job]) -> list[Job]:
    """One job per variant of `FIXED`, in its order: its first case, in float64 under jit."""
    first: dict[str, Job] = {}
    for job in wanted:
        variant, reference = job.listed.variant, job.listed.reference
        if ORIGINALS.get(variant, reference) == reference:
            first.setdefault(variant, job)
    return [first[name]._replace(eager=False, short=True) for name in FIXED if name in first]


def prove(wanted: Sequence[Job], workers: Workers) -> Iterator[Report]:
    """Yields the reports in order; a case that could not be compared gives an empty report."""
    for job, result in zip(wanted, workers.map(_prove, wanted), strict=True):
        failed = isinstance(result, Failure)
        report = not_proven(job.listed.title, result) if failed else result
        yield replace(report, flax_class=job.listed.of)


def not_proven(title: str, failure: Failure) -> Report:
    """An empty report, which counts as not equal."""
    from ..versions import versions

    return Report(title, (), notes=(failure.text,), versions=versions())


def record(
    wanted: Sequence[Job], cases: Sequence[Listed], workers: Workers
) -> Iterator[Path | Failure]:
    """Records torch's results for all cases of the jobs' variants; yields the files.

    Args:
      wanted: the jobs.
      cases: all known cases of their packages.
      workers: the worker processes.
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


def record_each(wanted: Sequence[tuple[Job, Path]], workers: Workers) -> Iterator[Path | Failure]:
    """Records the full results of each job's reference in its own file; yields the files."""
    for (job, _), result in zip(wanted, workers.map(_record_one, wanted), strict=True):
        failed = isinstance(result, Failure)
        yield Failure(f"not recorded: {result.text}", job.listed.title) if failed else result


def _record_one(wanted: tuple[Job, Path]) -> Path:
    job, file = wanted
    return job.case.record(file)


def _prove(job: Job) -> Report:
    case = job.case
    with strict() if case.home.is_own(case.flax_class) else nullcontext():
        return case.report(job.live, eager=job.eager)


def _record(cases: Sequence[Listed]) -> Path:
    """Records the cases of one variant."""
    from . import golden

    return golden.record([_cases(case.package, case.module)[case.at] for case in cases])


@lru_cache
def _cases(package: str, module: str) -> "list[Case]":
    """The cases of a module; cached, so the objects are the same each time."""
    return cases_in(package, module)
