"""Rows from runs: every output, tap, gradient and statistic of one run, judged."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import judge
from ..report import Row
from ..sides.match import TURNED, hidden, point_of
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
            pair = got.outputs[name], own.outputs[name]
            verdict = judge.exact(*(_wide(x, dtype) for x in pair))
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
    told = {names.tap(name) for name in truth.taps}
    own = [n for n in got.taps if point_of(n) not in TURNED]
    return [f"{n} (Flax)" for n in own if n not in told] + [
        f"{n} (torch)"
        for n in truth.taps
        if names.tap(n) not in got.taps and point_of(n) not in TURNED
    ]


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
    """The dtype and shape of every output, by name; the text of what is no number."""
    return {**{name: f"{x.dtype}{list(x.shape)}" for name, x in run.outputs.items()}, **run.others}


def same_structure(got: Mapping[str, str], want: Mapping[str, str], dtype: str, mode: str) -> Row:
    """Exact facts about the outputs: their names, shapes and dtypes.

    In all dtypes but float64 JAX has no integers of 64 bits: there widths of 32 and 64 are one.
    A key that holds None is one that is not there.
    """
    verdict: Any = judge.Verdict("exact", 0.0, 0.0)
    ours, torchs = _plain(got, want, dtype), _plain(want, got, dtype)
    if ours != torchs:
        told = f"Flax returns {dict(got)}, torch {dict(want)}"
        verdict = judge.unlike(told + _advice(ours, torchs))
    return Row(STRUCTURE, "exact", dtype, mode, verdict)


def _plain(one: Mapping[str, str], other: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Texts that are equal where the structure is."""
    return {
        name: text if dtype == "float64" else re.sub(r"^(u?int)64\[", r"\g<1>32[", text)
        for name, text in one.items()
        if text != "None" or name in other or name.endswith("]") or name == "output"
    }


def _advice(got: Mapping[str, str], want: Mapping[str, str]) -> str:
    """What to do where one side returns an array and the other several, or narrower integers."""
    for side, one, several in (("torch", got, want), ("Flax", want, got)):
        if list(one) == ["output"] and several and "output" not in several:
            alike = [name for name, text in several.items() if text == one["output"]]
            part = (alike or list(several))[0].removeprefix("output")
            call = f"{side.lower()}_call=lambda m, *xs: m(*xs){part}"
            return f": take {part} of what {side} returns: {call}"
    if {k: v.replace("int32[", "int64[") for k, v in got.items()} == dict(want):
        return ": .astype(int) gives integers of the width that the run has, as torch's are"
    return ""


def _wide(x: np.ndarray, dtype: str) -> np.ndarray:
    """Integers in the widest dtype of their kind, in runs in which JAX has it not."""
    wide = {"i": np.int64, "u": np.uint64}.get(x.dtype.kind)
    return x if wide is None or dtype == "float64" or x.itemsize < 4 else x.astype(wide)
