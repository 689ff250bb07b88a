"""Local errors: recomputes every tap from torch's own values, so that only its own fault shows.

In an extra run of Flax each tap is replaced, after it is computed, by torch's value, and its
cotangent by torch's gradient. Whatever differs is then wrong by itself: steps that only propagate
an error agree, and several faults are separated, in the backward pass too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .. import judge
from ..report import Divergence, Report, Row, plural
from ..rows.decoding import CutComparison
from ..rows.values import STRUCTURE
from ..search.span import Outcome
from ..sides.flax.side import Force
from ..sides.match import reuse_layouts
from ..sides.pair import Names, Pair, matches
from ..sides.run import Run, is_floating
from ..sides.steps import Decoded
from .backward import unaffected, unused
from .cause import cause_of, cause_of_gradients, cause_of_state, explains_all
from .decoding import with_steps
from .hints import attempt, backward_hint, fully_masked, likely, result_hint, state_hint
from .hints.indices import arrived_wrong, other_indices
from .hints.settings import explained_settings, other_settings, padding_row, state_settings
from .places import FaultSpan, Local, between, equivalent_taps, harmless_taps, local_fault

Runs = Mapping[tuple[str, str], tuple[Run, Run, Run]]
Places = list[tuple[FaultSpan | None, Divergence]]


def diagnosed(
    pair: Pair,
    report: Report,
    runs: Runs,
    decoding: tuple[Decoded, Sequence[CutComparison]] | None = None,
) -> Report:
    """Adds places to the report: local errors, divergences, maps and hints.

    `runs` are the report's runs by dtype and mode, `decoding` its decoding steps. Errors during the
    diagnosis do not affect the verdict.
    """
    pair.watch.at("looking for the place")
    rows = [row for row in report.failed if row.mode and row.kind != "decode"]
    try:
        placed = _diagnosed(pair, report, rows, runs) if rows and pair.request.taps else report
        if decoding is None:
            return placed
        steps, comparisons = decoding
        row = comparisons[0].row
        return with_steps(placed, steps, comparisons, runs[row.dtype, row.mode])
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        note = f"no place was found: the diagnosis itself failed, {type(error).__name__}: {first}"
        return replace(report, notes=(*report.notes, note))


def _diagnosed(pair: Pair, report: Report, rows: list[Row], runs: Runs) -> Report:
    float64 = [row for row in rows if row.dtype == "float64"]
    if float64:
        return _placed(pair, report, float64, runs)
    return _narrow(pair, report, rows[0], runs)


def _placed(pair: Pair, report: Report, failed: list[Row], runs: Runs) -> Report:
    """Diagnoses a failure in float64: values first, and gradients if no output differs."""
    mode = failed[0].mode
    plain, _, truth = runs["float64", mode]
    force = forces(plain, truth, pair.names)
    valued = any(row.kind in ("output", "exact") for row in failed)
    other = set() if valued else equivalent_taps(plain, truth, pair.names, force)
    local = Local.of(pair, mode, truth, {k: v for k, v in force.items() if k not in other})
    other = harmless_taps(local) if valued else other
    away = other if valued else unused(local)
    local = local.without(away) if away else local
    wrong = [row for row in local.wrong() if row.name not in other] if valued else []
    odd = [row for row in failed if row.name == STRUCTURE]
    whole = [row for row in wrong if not odd or row.name not in truth.outputs]
    value_places = _values(local, whole, plain)
    places = [place for _, place in value_places]
    places += [Divergence.of(row, "structure") for row in odd[:1]]
    arrived = [a for a in _gradients(local.run, truth, pair.names, mode) if a.row.name not in other]
    right = unaffected([a.row for a in arrived], local, report.rows)
    backward = [a for a in arrived if a.row.name not in right]
    late = [arrived for arrived in backward if arrived.row.verdict.differs]
    notes = (*report.notes, *dict.fromkeys(plain.findings["casts"]), *_equivalent_note(other))
    if not places:
        places += _gradient_places(local, plain, late)
    elif late:
        also = plural(len(late), "place")
        notes += (f"gradients are also off at {also}: mend the values first",)
    rows = [*_with_places(local, other, value_places), *(arrived.row for arrived in backward)]
    return replace(
        report,
        local=tuple(rows),
        divergences=tuple(places) or (_result(failed[0], local, plain),),
        maps=dict(_maps(wrong, local.run, truth, pair.names)),
        notes=notes,
    )


def _values(local: Local, wrong: list[Row], plain: Run) -> Places:
    """Places for wrong rows: steps whose inputs agree, and faults between taps.

    A value that is the input of several steps is reported once, before the first of them. A mistake
    that makes torch return exactly Flax's outputs is reported alone.
    """
    places: Places = []
    earlier: list[np.ndarray] = []
    for row in wrong:
        if arrived_wrong(local, row):
            continue
        span = between(local, row)
        if span is None:
            places.append((None, _at_tap(local, row)))
        elif not any(np.array_equal(span.got, x) for x in earlier):
            earlier.append(span.got)
            places.append((span, _at_span(local, row, span)))
        if span is not None and (fault := local_fault(local, row)):
            places.append((None, _at_tap(local, *fault)))
        if places and explains_all(local, places[-1][1].cause, plain):
            return places[-1:]
    explained = bool(places) and places[0][1].cause is not None
    return (_behind(local, wrong, plain) if explained else []) or places


def _behind(local: Local, wrong: list[Row], plain: Run) -> Places:
    """The one place behind a tap that Flax computes in another way, if its cause explains all.

    A port may tap a value before the activation that torch's submodule ends with: at the tap the
    activation seems to be left out, while the fault is behind it.
    """
    taps = [row.name for row in wrong if row.name in local.force][:1]
    if len(wrong) < 2 or not taps:
        return []
    other = local.without({*taps})
    # What is not replaced and is no output is computed another way with the same result.
    compared = {*other.force, *other.truth.outputs}
    for row in [row for row in other.wrong() if row.name in compared][:1]:
        span = between(other, row)
        place = _at_tap(other, row) if span is None else _at_span(other, row, span)
        if explains_all(other, place.cause, plain):
            return [(span, place)]
    return []


def _at_tap(local: Local, row: Row, got: np.ndarray | None = None) -> Divergence:
    """The place of a wrong tap or output, with its cause; `got` as `cause_of` takes it."""
    text = _first_of(local, row, (explained_settings, other_indices))
    outcome = attempt("search", lambda: cause_of(local, row, got=got), None)
    text = text or _sentence(outcome)
    note = "" if text else _first_of(local, row, (other_settings, _likely))
    tried = str(outcome) if outcome and outcome.tried and not text else ""
    return replace(Divergence.of(row, "value", text), search=outcome, note=note, advice=tried)


def _sentence(outcome: Outcome | None) -> str:
    """The cause that a search gave, or ""."""
    return outcome.cause.sentence if outcome and outcome.cause else ""


def _likely(local: Local, row: Row) -> str:
    """What the two arrays at a tap or an output make likely, or ""."""
    force = local.force.get(row.name)
    want = local.truth.outputs.get(row.name) if force is None else force.value
    got = local.run.taps.get(row.name, local.run.outputs.get(row.name))
    return "" if got is None or want is None else likely(got, want)


def _first_of(local: Local, row: Row, steps: Sequence[Callable[[Local, Row], str]]) -> str:
    """The first description that a step gives, or ""."""
    for step in steps:
        if description := attempt("of a place", lambda step=step: step(local, row), ""):
            return description
    return ""


def _at_span(local: Local, row: Row, span: FaultSpan) -> Divergence:
    """The place between two taps, with its cause."""
    outcome = attempt("search", lambda: cause_of(local, row, span), None)
    text = _sentence(outcome)
    note = "" if text else attempt("of a place", lambda: likely(span.got, span.want), "")
    tried = str(outcome) if outcome and outcome.tried and not text else ""
    advice = "; ".join(x for x in (tried, span.advice) if x)
    place = Divergence.of(span.row, "between", text)
    return replace(place, search=outcome, note=note, advice=advice)


def _with_places(local: Local, other: set[str], places: Places) -> Iterator[Row]:
    """The local rows, with rows for places between taps before the following step."""
    span = {between.step: between.row for between, _ in places if between is not None}
    for row in local.rows:
        if row.name in span:
            yield span[row.name]
        if row.name not in other:
            yield row


def _equivalent_note(other: set[str]) -> Iterator[str]:
    if other:
        yield f"computed another way inside, with the same result: {', '.join(sorted(other))}"


def _gradient_places(local: Local, plain: Run, late: Sequence["Arrived"]) -> list[Divergence]:
    """The places of wrong gradients; a stopped gradient is searched for once."""
    texts = [_gradient_hint(local, arrived) for arrived in late]
    outcome = attempt("search", lambda: cause_of_gradients(local, plain), None)
    places = []
    for arrived, text in zip(late, texts, strict=True):
        place = Divergence.of(arrived.row, "gradient", _sentence(outcome) or text)
        places.append(replace(place, search=outcome))
    return places


def _gradient_hint(local: Local, arrived: "Arrived") -> str:
    """The hint for one gradient."""
    name, got, want = arrived.row.name, arrived.got, arrived.want
    description = attempt("padding_row", lambda: padding_row(local, name, got, want), "")
    return description or backward_hint(got, want)


def _result(row: Row, local: Local, plain: Run) -> Divergence:
    """The divergence for a result that differs although no tap does."""
    description, truth, names, outcome = "", local.truth, local.pair.names, None
    if row.kind == "state":
        description = attempt("state_settings", lambda: state_settings(local, row.name), "")
        description = description or state_hint(row.name, plain, truth, names)
        if not description:
            outcome = attempt("search", lambda: cause_of_state(local, row.name), None)
            description = _sentence(outcome)
    description = result_hint(plain, truth, names) if row.kind == "output" else description
    place = Divergence.of(row, "value" if row.kind == "output" else row.kind, description)
    return replace(place, search=outcome)


def _narrow(pair: Pair, report: Report, failed: Row, runs: Runs) -> Report:
    """Diagnoses lost precision: the first tap in torch's call order that is worse than torch's."""
    dtype, mode = failed.dtype, failed.mode
    got, torch_run, truth = runs[dtype, mode]
    rows, other = [], _other_in_float64(pair, runs)
    wide = [
        each
        for (dtype_, _), (run, _, want) in runs.items()
        if dtype_ == "float64"
        for each in matches(run, want, pair.names)
    ]
    for name, flax_name, match in reuse_layouts(wide, got, truth) or matches(
        got, truth, pair.names, True
    ):
        if name in torch_run.taps and flax_name not in other:
            torch_value = match.layout.value(torch_run.taps[name]) * match.factor
            verdict = judge.same_precision(got.taps[flax_name], torch_value, match.value, dtype)
            rows.append(Row(flax_name, "local", dtype, mode, verdict))
    wrong = [row for row in rows if row.verdict.differs] or [failed]
    places = (Divergence.of(wrong[0], "precision"),)
    notes = (*report.notes, *dict.fromkeys(got.findings["casts"]))
    return replace(report, local=tuple(rows), divergences=places, notes=notes)


def _other_in_float64(pair: Pair, runs: Runs) -> set[str]:
    """Taps that differ in float64 while no output does."""
    names: set[str] = set()
    for (dtype, _), (got, _, truth) in runs.items():
        if dtype == "float64":
            names |= equivalent_taps(got, truth, pair.names, got.taps)
    return names


def forces(plain: Run, truth: Run, names: Names) -> dict[str, Force]:
    """Torch's values and gradients at every tap that both sides have, in Flax's layout."""
    by_tap = {}
    for name, flax_name, match in matches(plain, truth, names):
        if is_floating(truth.taps[name]):
            has_gradient = _is_own_gradient(truth, name)
            behind = match.gradient(truth.tap_gradients[name]) if has_gradient else None
            scores = truth.point(name) == "scores"
            value = _with_flax_fills(plain.taps[flax_name], match.value) if scores else match.value
            by_tap[flax_name] = Force(value, behind)
    return by_tap


def _with_flax_fills(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Torch's scores, but with Flax's fills in rows that are fully masked on both sides.

    A softmax of equal fills depends on their value, for example -inf or -1e30.
    """
    nothing = (
        fully_masked(got) & fully_masked(want) if got.shape == want.shape and got.size else False
    )
    return np.where(nothing, got, want)


def _is_own_gradient(truth: Run, name: str) -> bool:
    """Whether torch's gradient at a tap is known and has the tap's shape."""
    gradient = truth.tap_gradients.get(name)
    return gradient is not None and gradient.shape == truth.taps[name].shape


class Arrived(NamedTuple):
    """A gradient at a tap, parameter or input, and torch's."""

    row: Row
    got: np.ndarray
    want: np.ndarray


def _gradients(run: Run, truth: Run, names: Names, mode: str) -> Iterator[Arrived]:
    """Compares gradients at taps, parameters and inputs, given torch's gradients downstream."""
    if not run.gradients:
        return
    at_taps = {
        flax_name: match.gradient(truth.tap_gradients[name])
        for name, flax_name, match in matches(run, truth, names)
        if flax_name in run.tap_gradients and _is_own_gradient(truth, name)
    }
    at_leaves = names.gradients(truth.gradients)
    wanted = {**at_taps, **at_leaves}
    floor = judge.gradient_floor([at_leaves[name] for name in judge.of_one_size(at_leaves)])
    for name, want in wanted.items():
        got = run.tap_gradients[name] if name in at_taps else run.gradients[name]
        if name in at_taps and run.point(name) == "weights":
            # Gradients at zero weights have no effect and differ between implementations.
            got, want = (np.where(run.taps[name] == 0, 0.0, x) for x in (got, want))
        verdict = judge.same_function(got, want, max(judge.whole_gradient([want]), floor))
        yield Arrived(Row(name, "local gradient", "float64", mode, verdict), got, want)


def _maps(wrong: list[Row], run: Run, truth: Run, names: Names) -> Iterator[tuple[str, np.ndarray]]:
    """Absolute differences by element; 0 where both sides have the same infinity."""
    wants = {flax_name: match.value for _, flax_name, match in matches(run, truth, names)}
    for row in wrong:
        got = run.taps.get(row.name, run.outputs.get(row.name))
        want = wants.get(row.name, truth.outputs.get(row.name))
        if got is not None and want is not None and got.shape == want.shape:
            with np.errstate(invalid="ignore"):
                yield row.name, np.where(got == want, 0.0, np.abs(got - want))
