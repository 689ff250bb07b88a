"""Rows from runs: every output, tap, gradient and statistic of one run, judged."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import judge
from ..report import Row
from ..sides.match import TURNED, counterparts, hidden, point_of
from ..sides.pair import Names, matches
from ..sides.run import Run, is_floating

STRUCTURE = "names, shapes, dtypes"


def judged(got: Run, own: Run, truth: Run, names: Names, dtype: str, mode: str) -> list[Row]:
    """Every comparison of one run: taps in torch's call order, outputs, gradients, statistics."""
    rows = list(_sound(truth, dtype, mode))
    if dtype == "float64":
        rows += taps(got, truth, names, dtype, mode)
    rows.append(same_structure(structure(got), structure(own), dtype, mode))
    for name, want in truth.outputs.items():
        if name in got.outputs and is_floating(want):
            verdict = _value(got.outputs[name], own.outputs[name], want, dtype)
            rows.append(Row(name, "output", dtype, mode, verdict))
        elif name in got.outputs:
            verdict = judge.exact(got.outputs[name], own.outputs[name])
            rows.append(Row(name, "output", dtype, mode, verdict))
    if got.gradients:
        rows += _judged_gradients(got, own, truth, names, dtype, mode)
    rows += [
        Row("matmul precision", "exact", dtype, mode, judge.unlike(found))
        for found in got.findings.get("products", ())
    ]
    return rows


def _sound(truth: Run, dtype: str, mode: str) -> Iterator[Row]:
    """What torch itself gives must be numbers: NaN equals nothing, and proves nothing."""
    for name, value in {**truth.outputs, **truth.gradients}.items():
        if is_floating(value) and np.isnan(value).any():
            where = [int(i) for i in np.argwhere(np.isnan(value))[0]]
            told = (
                f"torch itself gives NaN in {name} at {where}, which proves nothing: choose inputs "
                "and masks for which it gives numbers"
            )
            yield Row(name, "exact", dtype, mode, judge.unlike(told))


def taps(got: Run, truth: Run, names: Names, dtype: str, mode: str, kind: str = "tap") -> list[Row]:
    """Every tap that both sides have, in torch's call order."""
    rows = []
    for _, there, match in matches(got, truth, names):
        value = hidden(got.taps[there]) if point_of(there) == "scores" else got.taps[there]
        rows.append(Row(there, kind, dtype, mode, judge.same_function(value, match.value)))
    return rows


def unpaired(got: Run, truth: Run, names: Names) -> list[str]:
    """Taps that one side has alone; of torch's points inside attention those it names itself."""
    pairs, shapes = counterparts(got, truth, names.tap)
    told = {*pairs.values(), *shapes.values()}
    own = [n for n in got.taps if point_of(n) not in TURNED]
    return [f"{n} (Flax)" for n in own if n not in told] + [
        f"{n} (torch)"
        for n in truth.taps
        if n not in pairs and n not in shapes and point_of(n) not in TURNED
    ]


def other_shapes(got: Run, truth: Run, names: Names) -> list[str]:
    """A sentence for taps that both sides have, but in shapes that no layout brings together."""
    _, shapes = counterparts(got, truth, names.tap)
    told = [
        f"{there} (Flax {list(got.taps[there].shape)}, torch {list(truth.taps[name].shape)})"
        for name, there in shapes.items()
    ]
    return [f"seen on both sides in other shapes: {', '.join(told)}"] if told else []


def _value(got: np.ndarray, own: np.ndarray, want: np.ndarray, dtype: str) -> judge.Verdict:
    if dtype == "float64":
        return judge.same_function(got, want)
    return judge.same_precision(got, own, want, dtype)


def gradients(own: Run, truth: Run, names: Names, dtype: str):
    """Each wanted gradient with its scale and torch's own error; in float64 that is None.

    In narrow dtypes torch's own error is that of all gradients together.
    """
    wanted, owns = names.gradients(truth.gradients), names.gradients(own.gradients)
    values = list(wanted.values())
    if dtype == "float64":
        for name, want in wanted.items():
            yield name, want, judge.gradient_scale(values, want), None
    else:
        scale = judge.whole_gradient(values)
        apart = [owns[name].astype(np.float64) - want for name, want in wanted.items()]
        error = judge.whole_gradient(apart) / scale if scale else 0.0
        for name, want in wanted.items():
            yield name, want, scale, error


def _judged_gradients(got, own, truth, names, dtype, mode) -> list[Row]:
    rows = []
    for name, want, scale, error in gradients(own, truth, names, dtype):
        if error is None:
            verdict = judge.same_function(got.gradients[name], want, scale)
        else:
            verdict = judge.within_precision(got.gradients[name], error, want, dtype, scale)
        rows.append(Row(name, "gradient", dtype, mode, verdict))
    return rows


def structure(run: Run) -> dict[str, str]:
    """The dtype and shape of every output, by name."""
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in run.outputs.items()}


def same_structure(got: Mapping[str, str], want: Mapping[str, str], dtype: str, mode: str) -> Row:
    """Exact facts about the outputs: their names, shapes and dtypes."""
    verdict: Any = judge.Verdict("exact", 0.0, 0.0)
    if got != want:
        verdict = judge.unlike(f"Flax returns {dict(got)}, torch {dict(want)}")
    return Row(STRUCTURE, "exact", dtype, mode, verdict)
