"""What workers get to do: cases by their positions; the fixed set of the command."""

from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..report import Report
from .collect import Listed, cases_in
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
      devices: number of devices over which its inputs are sharded, if any.
    """

    listed: Listed
    live: bool
    eager: bool
    seed: int | None = None
    short: bool = False
    devices: int = 0

    @property
    def case(self) -> "Case":
        """The case itself; imports its module."""
        case = copy(cases_in(self.listed.package, self.listed.module)[self.listed.at])
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


def not_proven(title: str, why: str) -> Report:
    """An empty report, which counts as not equal."""
    from ..versions import versions

    return Report(title, (), notes=(why,), versions=versions())


def record(
    wanted: Sequence[Job], known: Sequence[Listed], workers: Workers
) -> Iterator[tuple[str, Path | Failure]]:
    """Records torch's results for all cases of the jobs' variants; yields these and the files.

    Args:
      wanted: the jobs.
      known: all cases of their packages.
      workers: the worker processes.
    """
    groups: dict[tuple[str, str], list[Listed]] = {
        (job.listed.package, job.listed.variant): [] for job in wanted
    }
    for case in known:
        groups.get((case.package, case.variant), []).append(case)
    variants = [variant for _, variant in groups]
    return zip(variants, workers.map(_record, list(groups.values())), strict=True)


def record_one(wanted: tuple[Job, Path]) -> Path:
    """Records the full results of a job's reference in a file, and returns its path."""
    job, file = wanted
    return job.case.record(file)


def _record(cases: Sequence[Listed]) -> Path:
    """Records the cases of one variant."""
    from . import golden

    return golden.record([cases_in(case.package, case.module)[case.at] for case in cases])
