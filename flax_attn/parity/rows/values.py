"""Rows of values: every output, tap, gradient and statistic of one run, judged."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ...weights.known_layers import flax_path
from ...weights.mapping import nearest, some
from .. import judge
from ..report import Row
from ..sides.match import TRANSPOSED_POINTS, reuse_layouts
from ..sides.pair import Names, matches
from ..sides.run import MODEL_OUTPUT, OUTPUT, Run, is_floating

STRUCTURE = "names, shapes, dtypes"
MatchingTaps = tuple[dict[str, str], dict[str, str]]  # the result of `matching_taps`


def judged(
    got: Run,
    torch_run: Run,
    truth: Run,
    names: Names,
    dtype: str,
    mode: str,
    noisy: Sequence[Run] = (),
    library: str = "torch",
) -> list[Row]:
    """Every comparison of one run: taps in torch's call order, outputs, gradients, statistics.

    `noisy` are torch's runs in `dtype` with perturbed rounding. Where the first side is JAX's
    (`library`), what is NaN or one number on both sides proves nothing, but is no difference.
    """
    rows = list(_check_finite(truth, dtype, mode)) if library == "torch" else []
    if dtype == "float64":
        rows += taps(got, truth, names, dtype, mode, noisy=noisy)
    rows.append(same_structure(structure(got), structure(torch_run), dtype, mode))
    for name, want in truth.outputs.items():
        if name in got.outputs:
            moved = [run.outputs[name] for run in noisy]
            verdict = value_of(got.outputs[name], torch_run.outputs[name], want, dtype, moved)
            rows.append(Row(name, "output", dtype, mode, verdict))
    if got.gradients:
        rows += _judged_gradients(got, torch_run, truth, names, dtype, mode, noisy)
    rows += [
        Row("matmul precision", "exact", dtype, mode, judge.failed_fact(sentence))
        for sentence in got.findings.get("products", ())
        if not torch_run.findings.get("products")  # else the first side asks for no more
    ]
    return rows if library == "torch" else _without_empty(rows, got, truth, names)


def _without_empty(rows: Sequence[Row], got: Run, truth: Run, names: Names) -> list[Row]:
    """The rows, those of values that are alike whatever was computed as inconclusive."""
    gradients = got.gradients, names.gradients(truth.gradients)
    values = {"output": (got.outputs, truth.outputs), "gradient": gradients}
    judged = []
    for row in rows:
        why = ""
        if row.kind in values:
            one, other = (side[row.name] for side in values[row.kind])
            why = _no_evidence(one, other, row.kind == "output") if is_floating(other) else ""
        verdict = replace(row.verdict, shows=False, note=why) if why else row.verdict
        judged.append(replace(row, verdict=verdict))
    return judged


def _no_evidence(got: np.ndarray, want: np.ndarray, constant: bool) -> str:
    """Why two values that agree prove nothing, or ""."""
    if got.shape != want.shape or not want.size:
        return ""
    nan = np.isnan(want)
    if nan.any() and np.array_equal(np.isnan(got), nan):
        where = [int(i) for i in np.argwhere(nan)[0]]
        return f"NaN on both sides, as at {where}, proves nothing: choose inputs that give numbers"
    first = want.flat[0]
    if constant and want.size > 1 and (want == first).all() and (got == first).all():
        return f"every element is {float(np.real(first)):.6g} on both sides, which proves nothing"
    return ""


def _check_finite(truth: Run, dtype: str, mode: str) -> Iterator[Row]:
    """Rows that fail where torch itself returns NaN, which cannot be compared."""
    for name, value in {**truth.outputs, **truth.gradients}.items():
        if is_floating(value) and np.isnan(value).any():
            where = [int(i) for i in np.argwhere(np.isnan(value))[0]]
            sentence = (
                f"torch itself gives NaN in {name} at {where}, which proves nothing: choose inputs "
                "and masks for which it gives numbers"
            )
            yield Row(name, "exact", dtype, mode, judge.failed_fact(sentence))


def taps(
    got: Run,
    truth: Run,
    names: Names,
    dtype: str,
    mode: str,
    kind: str = "tap",
    noisy: Sequence[Run] = (),
) -> list[Row]:
    """Compares every tap that both sides have, in torch's call order."""
    rows, known = [], list(matches(got, truth, names))
    noisy_taps = [{name: m.value for name, _, m in reuse_layouts(known, got, run)} for run in noisy]
    for name, flax_name, match in known:
        moved = [values[name] for values in noisy_taps if name in values]
        verdict = judge.same_function(match.got, match.value, fill=True, noisy=moved)
        rows.append(Row(flax_name, kind, dtype, mode, verdict))
    return rows


def unpaired(got: Run, truth: Run, matching: MatchingTaps) -> list[str]:
    """Taps of one side only, except the query, key, value and context inside attention."""
    pairs, shapes = matching
    matched_names = {*pairs.values(), *shapes.values()}
    flax_taps = [n for n in got.taps if got.point(n) not in TRANSPOSED_POINTS]
    return [f"{n} (Flax)" for n in flax_taps if n not in matched_names] + [
        f"{n} (torch)"
        for n in truth.taps
        if n not in pairs and n not in shapes and truth.point(n) not in TRANSPOSED_POINTS
    ]


def other_shapes(got: Run, truth: Run, matching: MatchingTaps) -> list[str]:
    """A note on taps that both sides have, but in shapes that no layout reconciles."""
    _, shapes = matching
    pairs = {flax: (got.taps[flax].shape, truth.taps[name].shape) for name, flax in shapes.items()}
    parts = [
        f"{x} (Flax {list(flax_shape)}, torch {list(torch_shape)})"
        for x, (flax_shape, torch_shape) in pairs.items()
    ]
    return [f"seen on both sides in other shapes: {', '.join(parts)}"] if parts else []


def unused_rules(got: Run, truth: Run, names: Names) -> Iterator[str]:
    """A note for each rule that applies only to taps and pairs none."""
    plan = names.plan
    carried = [name for move in plan.moves for name in move.sources] if plan else []
    carried += [*plan.constants, *plan.tied] if plan else []
    torch_taps = list(dict.fromkeys(name.partition("#")[0] for name in truth.taps))
    flax_taps = {name.partition("#")[0] for name in got.taps}
    for rule in names.rules if torch_taps else ():
        targets = {flax_name for _, (flax_name, *_) in rule.groups(torch_taps)}
        if rule.groups(carried) or {flax_path(names.module, name) for name in targets} & flax_taps:
            continue
        torch_name, flax_name = rule.sides
        if targets:
            suggestion = nearest(flax_name, flax_taps)
            yield f"{rule} pairs no tap: Flax has no {flax_name}; nearest: {suggestion}"
        else:
            suggestion = nearest(torch_name, torch_taps)
            yield f"{rule} pairs no tap: torch has no {torch_name}; nearest: {suggestion}"


def ineffective_weights(got: Run, truth: Run, names: Names) -> Iterator[str]:
    """Notes on weights and inputs without effect, e.g. those of scores over a single key.

    The gradients of matrices may be rounding, as of queries and keys if all tokens are alike; those
    of the biases of keys are so for any input.
    """
    wanted = names.gradients(truth.gradients)
    rounding = judge.SAME_FUNCTION * judge.whole_gradient([*wanted.values()])
    without_effect = []
    for name, x in wanted.items():
        is_matrix = x.ndim > 1 and not name.endswith("bias")
        none = is_matrix and judge.whole_gradient([x]) <= rounding
        if x.size and (none or not (x.any() or got.gradients[name].any())):
            without_effect.append(name)
    inputs = [name for name in without_effect if name.startswith("input ")]
    if weights := [name for name in without_effect if name not in inputs]:
        yield f"this input does not test {some(weights)}: their gradients are zero on both sides"
    if inputs:
        yield f"neither side reads {some(inputs)}: gradients are zero on both sides"


def constant_outputs(got: Run, truth: Run) -> Iterator[str]:
    """Notes on floating outputs that are one number on both sides, whatever was computed."""
    for name in truth.outputs.keys() & got.outputs.keys():
        if is_floating(truth.outputs[name]) and truth.outputs[name].any():
            why = _no_evidence(got.outputs[name], truth.outputs[name], True)
            if why.startswith("every"):
                yield f"{name}: {why}"


def value_of(
    got: np.ndarray,
    torch_value: np.ndarray,
    want: np.ndarray,
    dtype: str,
    moved: Sequence[np.ndarray] = (),
) -> judge.Verdict:
    """The verdict on one Flax value, given torch's in this dtype and in float64."""
    if not is_floating(want):
        return judge.same_values(got, torch_value)
    if dtype == "float64":
        return judge.same_function(got, want, fill=True, noisy=moved)
    verdict = judge.same_precision(got, torch_value, want, dtype, fill=True)
    return _with_noise(verdict, torch_value, None, moved)


def judged_by_size(
    got: np.ndarray,
    want: np.ndarray,
    dtype: str,
    scale: float | None,
    torch_error: float | None,
    zero: bool = False,
    noisy: Sequence[np.ndarray] = (),
) -> judge.Verdict:
    """The verdict on a value, or on its sketch, given the scale of its error and torch's error."""
    if dtype == "float64":
        return judge.same_function(got, want, scale, zero, noisy=noisy)
    assert torch_error is not None  # it is measured in every narrower dtype
    return judge.within_precision(got, torch_error, want, dtype, scale, zero)


def _with_noise(
    verdict: judge.Verdict,
    torch_value: np.ndarray,
    scale: float | None,
    moved: Sequence[np.ndarray],
) -> judge.Verdict:
    """Adds torch's own rounding noise to a verdict; it sets no limit in a narrow dtype."""
    errors = [judge.error(x, torch_value, scale) for x in moved]
    return replace(verdict, noise=max(errors)) if errors else verdict


def gradients(torch_run: Run, truth: Run, names: Names, dtype: str) -> Iterator[tuple]:
    """Yields each expected gradient, the scale for its error, and torch's own error.

    The scale is None for the gradient's own norm, and torch's error is None in float64. In narrow
    dtypes both refer to all gradients together. Input gradients much larger than the parameters'
    are judged by themselves.
    """
    wanted, owns = names.gradients(truth.gradients), names.gradients(torch_run.gradients)
    comparable = {name: wanted[name] for name in judge.of_one_size(wanted)}
    if dtype == "float64":
        floor = judge.gradient_floor(list(comparable.values()))
        for name, want in wanted.items():
            small = name in comparable and floor > judge.whole_gradient([want])
            yield name, want, floor if small else None, None
        return
    whole = judge.whole_gradient(list(comparable.values()))
    differences = [owns[name].astype(x.dtype) - x for name, x in comparable.items()]
    error = judge.whole_gradient(differences) / whole if whole else 0.0
    for name, want in wanted.items():
        if name in comparable:
            yield name, want, whole, error
        else:
            yield name, want, None, judge.error(owns[name], want)


def _judged_gradients(
    got: Run, torch_run: Run, truth: Run, names: Names, dtype: str, mode: str, noisy: Sequence[Run]
) -> list[Row]:
    rows, owns = [], names.gradients(torch_run.gradients)
    runs = [names.gradients(run.gradients) for run in noisy]
    for name, want, scale, error in gradients(torch_run, truth, names, dtype):
        moved, value = [run[name] for run in runs], got.gradients[name]
        verdict = judged_by_size(value, want, dtype, scale, error, zero=True, noisy=moved)
        if dtype != "float64":
            verdict = _with_noise(verdict, owns[name], scale, moved)
        rows.append(Row(name, "gradient", dtype, mode, verdict))
    return rows


def structure(run: Run) -> dict[str, str]:
    """The dtype and shape of every output, by name; the text of non-numeric outputs."""
    return {**{name: f"{x.dtype}{list(x.shape)}" for name, x in run.outputs.items()}, **run.others}


def same_structure(got: Mapping[str, str], want: Mapping[str, str], dtype: str, mode: str) -> Row:
    """Compares the outputs' names, shapes and dtypes; integers of any width count as one dtype.

    The values of integers are compared exactly, whatever their width. A key that holds None counts
    as missing.
    """
    flax_structure, torch_structure = _plain(got, want), _plain(want, got)
    if flax_structure != torch_structure:
        sentence = f"Flax returns {dict(got)}, torch {dict(want)}"
        verdict = judge.failed_fact(sentence + _advice(flax_structure, torch_structure))
        return Row(STRUCTURE, "exact", dtype, mode, verdict)
    kinds = (
        (name, x.partition("[")[0], got.get(name, x).partition("[")[0]) for name, x in want.items()
    )
    widths = [f"{name} is {flax} beside {torch}" for name, torch, flax in kinds if flax != torch]
    note = f"{'; '.join(widths)}: integers are compared by value" if widths else ""
    return Row(STRUCTURE, "exact", dtype, mode, judge.Verdict("exact", 0.0, 0.0, note=note))


def _plain(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Normalised descriptions, equal if the structures are."""
    return {
        name: re.sub(r"^u?int\d+\[", "int[", text)
        for name, text in one.items()
        if text != "None" or name in other or name.endswith("]") or name in (OUTPUT, MODEL_OUTPUT)
    }


def _advice(got: Mapping[str, str], want: Mapping[str, str]) -> str:
    """Advice for one array instead of several, or for a tuple instead of an object with fields."""
    for side, other, one, two in (("torch", "Flax", want, got), ("Flax", "torch", got, want)):
        fields, count = _top(one, r"\.([^\W\d]\w*)"), len(_top(two, r"\[(\d+)\]"))
        if fields and count:
            names = ", ".join(fields)
            call = f"{other.lower()}_call=lambda m, *xs: dict(zip({fields}, m(*xs)))"
            advice = f": {call}" if len(fields) == count else ""
            return f": {side} returns an object with {names}; {other} a tuple of {count}{advice}"
    for side, one, several in (("torch", got, want), ("Flax", want, got)):
        (name, text), *more = one.items() or [("", "")]
        if name in (OUTPUT, MODEL_OUTPUT) and not more and several and name not in several:
            same_text = [part for part, other in several.items() if other == text]
            part = (same_text or list(several))[0].removeprefix(name)
            call = f"{side.lower()}_call=lambda m, *xs: m(*xs){part}"
            return f": take {part} of what {side} returns: {call}"
    return ""


def _top(structure: Mapping[str, str], suffix: str) -> tuple[str, ...]:
    """The outermost keys of all outputs; empty unless every name goes on by the pattern."""
    pattern = re.compile(rf"(?:{OUTPUT}|{MODEL_OUTPUT}){suffix}")
    matches = [pattern.match(name) for name in structure]
    return tuple(dict.fromkeys(match[1] for match in matches if match)) if all(matches) else ()
