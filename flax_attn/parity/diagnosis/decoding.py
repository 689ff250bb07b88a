"""Diagnosis of decoding: the first step that differs, and its likely cause."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..report import Divergence, Report
from ..rows.decoding import CutComparison
from ..sides.run import Run
from ..sides.steps import Decoded, joined
from .hints import attempt
from .hints.decoding import DecodeFailure, decode_hint

UNAFFECTED = "each cut is what Flax's own full forward pass is: mend the layer, not its cache"


def with_steps(
    report: Report, steps: Decoded, comparisons: Sequence[CutComparison], runs: tuple[Run, Run, Run]
) -> Report:
    """Adds the first step that differs to the report.

    If the full forward pass differs as well, steps are compared with Flax's own full forward pass,
    so that only errors of the cache are reported.
    """
    wrong = [each for each in comparisons if each.row.verdict.differs]
    elsewhere = any(row.kind != "decode" for row in report.failed)
    against = "whole" if elsewhere else "torch"
    wrong = [each for each in wrong if each.against == against] or ([] if elsewhere else wrong)
    if not wrong:
        unaffected = elsewhere and any(each.against == "whole" for each in comparisons)
        return replace(report, notes=(*report.notes, *((UNAFFECTED,) if unaffected else ())))
    first = min(wrong, key=lambda each: each.place.step if each.place else 0)
    place = _place(first, wrong, steps, runs)
    maps = {**report.maps, **_map(first, steps, runs)}
    return replace(report, divergences=(*report.divergences, place), maps=maps)


def _place(
    first: CutComparison, wrong: Sequence[CutComparison], steps: Decoded, runs: tuple[Run, Run, Run]
) -> Divergence:
    description = ""
    if first.place is not None and first.row.dtype == "float64":
        stepped = DecodeFailure(steps, first.place, wrong, len(steps.cuts), runs[0], runs[2])
        description = attempt("decode_hint", lambda: decode_hint(stepped), "")
    place = Divergence.of(first.row, "decode", description)
    where = str(first.place) if first.place else first.row.name
    where += ", against Flax's own full forward pass" if first.against == "whole" else ""
    return replace(place, tap=where, advice=_cuts_that_differ(wrong, steps))


def _cuts_that_differ(wrong: Sequence[CutComparison], steps: Decoded) -> str:
    """Lists the splits that differ, with their first wrong token, and those that agree."""
    off = {each.cut: each.place for each in wrong}
    parts = [f"{cut} from token {place.token}" if place else f"{cut}" for cut, place in off.items()]
    right = ", ".join(str(cut) for cut in steps.cuts if cut not in off)
    return f"cuts that differ: {', '.join(parts)}; cuts that agree: {right or 'none'}"


def _map(first: CutComparison, steps: Decoded, runs: tuple[Run, Run, Run]) -> dict[str, np.ndarray]:
    got, _, truth = (run.outputs[steps.output] for run in runs)
    torch_steps = steps.truth[first.cut].outputs if steps.truth else None
    mine = joined(steps.got[first.cut].outputs, steps.axis)
    torch_output = truth if torch_steps is None else joined(torch_steps, steps.axis)
    want = got if first.against == "whole" else torch_output
    if mine is None or want is None or mine.shape != want.shape:
        return {}
    return {first.row.name: np.abs(mine - want)}
