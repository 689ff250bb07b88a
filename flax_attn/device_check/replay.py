"""Part two: PyTorch's recorded results for every layer, against this device.

In float32 with IEEE products, since a GPU rounds float32 products to ten bits by default, and in
bfloat16. As in `flax-attn parity`, an error may be a few times PyTorch's own.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import jax

from ..parity.cases.collect import Listed
from ..parity.cases.prove import Job
from ..parity.cases.selection import select_cases
from ..parity.cases.strict import strict
from ..parity.cases.workers import Failure, Workers
from ..parity.report import Report
from .facts import processes
from .task import Task

CASES = "parity_tests"
DTYPES = ("float32", "bfloat16")
SMALL_LAYERS = 6  # layers of a small check


def run(task: Task) -> None:
    """Writes a row for each case and dtype, beginning with one case of every layer."""
    with Workers(processes(task)) as workers:
        listed = _in_order(select_cases(CASES, (), workers).cases)
        chosen = listed[:SMALL_LAYERS] if task.small else listed
        items = [(case, dtype) for case in chosen for dtype in DTYPES]
        layers = len({case.variant for case in chosen})
        results = workers.map(_replayed, items)
        pairs = zip(items, results, strict=True)
        for (case, dtype), result in task.in_time(pairs, len(items), "pairs of a case and a dtype"):
            _write(task, case, dtype, layers, result)


def _in_order(listed: Sequence[Listed]) -> list[Listed]:
    """Orders cases: the first case of each layer, the second of each, and so on."""
    count: dict[str, int] = {}
    ordered = []
    for case in listed:
        ordered.append(count.get(case.variant, 0))
        count[case.variant] = ordered[-1] + 1
    return [case for _, case in sorted(zip(ordered, listed, strict=True), key=lambda x: x[0])]


def _replayed(item: tuple[Listed, str]) -> Report | None:
    """Returns the report of a case in one dtype; None if it was not recorded in it."""
    listed, dtype = item
    case = Job(listed, live=False, eager=False).case
    if dtype not in case.dtypes:
        return None
    case.dtypes = (dtype,)
    checks = strict() if case.home.is_own(case.flax_class) else nullcontext()
    with checks, jax.default_matmul_precision("highest"):
        return case.report(live=False, eager=False)


def _write(
    task: Task, case: Listed, dtype: str, layers: int, result: Report | Failure | None
) -> None:
    facts = {"layer": case.variant, "of": layers, "case": case.title, "dtype": dtype}
    if isinstance(result, Failure):
        task.write(**facts, verdict="failed", text=result.text)
    elif result is not None:
        verdict = "equal" if result.ok else "different"
        text = {} if result.ok else {"text": str(result)}
        task.write(**facts, verdict=verdict, share=worst_share(result), **text)


def worst_share(report: Report) -> float:
    """The largest ratio of an error to its limit in a report."""
    verdicts = [row.verdict for row in report.rows if row.verdict.shows and row.verdict.limit]
    return max((v.error / v.limit for v in verdicts), default=0.0)
