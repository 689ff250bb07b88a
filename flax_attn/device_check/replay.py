"""PyTorch's recorded results for every layer, against this device.

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
from .part import Part

CASES = "parity_tests"
DTYPES = ("float32", "bfloat16")
SMALL_LAYERS = 6  # layers of a small check


def run(part: Part) -> None:
    """Writes a row for each case and dtype, beginning with one case of every layer."""
    with Workers(part.processes()) as workers:
        listed = in_order(select_cases(CASES, (), workers).cases)
        every = len({case.variant for case in listed})
        chosen = listed[:SMALL_LAYERS] if part.small else listed
        counts = {"of": len({case.variant for case in chosen}), "all": every}
        items = [(case, dtype) for case in chosen for dtype in DTYPES]
        pairs = zip(items, workers.map(_replayed, items), strict=True)
        for (case, dtype), result in part.in_time(pairs, len(items), "pairs of a case and a dtype"):
            write(part, case, dtype, counts, result)


def in_order(listed: Sequence[Listed]) -> list[Listed]:
    """Orders cases: the first case of each layer, the second of each, and so on."""
    count: dict[str, int] = {}
    ordered = []
    for case in listed:
        count[case.variant] = count.get(case.variant, -1) + 1
        ordered.append((count[case.variant], case))
    return [case for _, case in sorted(ordered, key=lambda pair: pair[0])]


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


def write(
    part: Part, case: Listed, dtype: str, counts: dict[str, int], result: Report | Failure | None
) -> None:
    """Writes the row of a case; none if it was not recorded in this dtype."""
    row = {"layer": case.variant, **counts, "case": case.title, "dtype": dtype}
    if isinstance(result, Failure):
        part.write(**row, verdict="failed", text=result.text)
    elif result is not None:
        verdicts = [row.verdict for row in result.rows if row.verdict.shows and row.verdict.limit]
        share = max((v.error / v.limit for v in verdicts), default=0.0)
        text = {"verdict": "equal"} if result.ok else {"verdict": "different", "text": str(result)}
        part.write(**row, share=share, **text)
