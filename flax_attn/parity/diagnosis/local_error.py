"""Diagnosis: every tap computed again from torch's own values, so that only its own fault shows.

In one more run of Flax each tap, once computed, is replaced by what torch had there, and each
cotangent that arrives at it by torch's gradient. What differs then differs by itself: an innocent
step that only passes an error on agrees, and several faults are told apart, backward ones too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .. import judge
from ..report import Divergence, Report, Row
from ..rows.values import STRUCTURE, taps
from ..sides.flax import Force
from ..sides.match import paired, point_of
from ..sides.pair import Names, Pair, matches
from ..sides.run import Run, is_floating
from .hints import backward_hint, hint

Runs = Mapping[tuple[str, str], tuple[Run, Run, Run]]


def diagnosed(pair: Pair, report: Report, runs: Runs) -> Report:
    """The report with places: local errors, divergences, maps and hints.

    `runs` are those that it tells of, by dtype and mode.
    """
    rows = [row for row in report.failed if row.mode]
    if not rows or not pair.request.taps:
        return report
    float64 = [row for row in rows if row.dtype == "float64"]
    if float64:
        return _placed(pair, report, float64, runs)
    return _narrow(pair, report, rows[0], runs)


def _placed(pair: Pair, report: Report, failed: list[Row], runs: Runs) -> Report:
    """Where float64 differs: values first, and gradients where all values agree."""
    mode = failed[0].mode
    plain, _, truth = runs["float64", mode]
    force = forces(plain, truth, pair.names)
    weights = pair.weights(pair.narrow("float64"))
    run = pair.run_flax(pair.flax("float64", mode, force), weights)
    rows = [*taps(run, truth, pair.names, "float64", mode, "local"), *_outputs(run, truth, mode)]
    backward = list(_gradients(run, truth, pair.names, mode))
    wrong = [row for row in rows if row.verdict.differs]
    late = [arrived for arrived in backward if arrived.row.verdict.differs]
    odd = [row for row in failed if row.name == STRUCTURE]
    places = [
        Divergence.of(row, "value", hint(row, run, truth, pair.names))
        for row in wrong
        if not odd or row.name not in truth.outputs
    ]
    places += [Divergence.of(row, "structure") for row in odd[:1]]
    notes = (*report.notes, *dict.fromkeys(plain.findings["casts"]))
    if not places:
        places += [Divergence.of(a.row, "gradient", backward_hint(a.got, a.want)) for a in late]
    elif late:
        notes += (f"gradients differ by themselves at {len(late)} places: values come first",)
    return replace(
        report,
        local=(*rows, *(arrived.row for arrived in backward)),
        divergences=tuple(places),
        maps=dict(_maps(wrong, run, truth, pair.names)),
        notes=notes,
    )


def _narrow(pair: Pair, report: Report, failed: Row, runs: Runs) -> Report:
    """Where precision is lost: the first tap, in torch's call order, that is worse than torch's."""
    dtype, mode = failed.dtype, failed.mode
    got, own, truth = runs[dtype, mode]
    rows = []
    for name, there, match in matches(got, truth, pair.names):
        if name in own.taps:
            theirs = match.layout.value(own.taps[name])
            verdict = judge.same_precision(got.taps[there], theirs, match.value, dtype)
            rows.append(Row(there, "local", dtype, mode, verdict))
    wrong = [row for row in rows if row.verdict.differs] or [failed]
    places = (Divergence.of(wrong[0], "precision"),)
    notes = (*report.notes, *dict.fromkeys(got.findings["casts"]))
    return replace(report, local=tuple(rows), divergences=places, notes=notes)


def forces(plain: Run, truth: Run, names: Names) -> dict[str, Force]:
    """Torch's values and gradients at every tap that both sides have, in Flax's layout."""
    found = {}
    for name, there, match in matches(plain, truth, names):
        if is_floating(truth.taps[name]):
            gradient = truth.tap_gradients.get(name)
            behind = None if gradient is None else match.gradient(gradient)
            found[there] = Force(match.value, behind)
    return found


def _outputs(run: Run, truth: Run, mode: str) -> Iterator[Row]:
    for name, want in truth.outputs.items():
        if name in run.outputs and is_floating(want):
            verdict = judge.same_function(run.outputs[name], want)
            yield Row(name, "local", "float64", mode, verdict)


class Arrived(NamedTuple):
    """A gradient that arrived somewhere, and torch's."""

    row: Row
    got: np.ndarray
    want: np.ndarray


def _gradients(run: Run, truth: Run, names: Names, mode: str) -> Iterator[Arrived]:
    """What arrives at each tap, and at each parameter and input, with torch's gradients behind."""
    if not run.gradients:
        return
    at_taps = {
        there: match.gradient(truth.tap_gradients[name])
        for name, there, match in matches(run, truth, names)
        if name in truth.tap_gradients and there in run.tap_gradients
    }
    wanted = {**at_taps, **names.gradients(truth.gradients)}
    for name, want in wanted.items():
        got = run.tap_gradients[name] if name in at_taps else run.gradients[name]
        if name in at_taps and point_of(name) == "weights":
            # What arrives at a weight of zero goes nowhere, and each side has its own there.
            got, want = (np.where(run.taps[name] == 0, 0.0, x) for x in (got, want))
        verdict = judge.same_function(got, want, judge.gradient_scale(list(wanted.values()), want))
        yield Arrived(Row(name, "local gradient", "float64", mode, verdict), got, want)


def _maps(wrong: list[Row], run: Run, truth: Run, names: Names) -> Iterator[tuple[str, np.ndarray]]:
    """How far apart the two sides are, element by element; -inf against -inf is nothing."""
    there = {names.tap(name): want for name, want in {**truth.taps, **truth.outputs}.items()}
    for row in wrong:
        got = run.taps.get(row.name, run.outputs.get(row.name))
        match = None if got is None else paired(row.name, got, there[row.name])
        if match is not None:
            same = got == match.value
            with np.errstate(invalid="ignore"):
                yield row.name, np.where(same, 0.0, np.abs(got - match.value))
