"""Goldens: torch's results for the cases of a variant, for running parity checks without torch.

A golden is a recording that holds sketches of values in place of values, of many cases in one file.
Weights and inputs are drawn again.
"""

import itertools
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ParityError
from ...weights.described import Source
from ...weights.plan import make_plan
from .. import draw, judge
from ..compare import make_pair
from ..decode import Decode
from ..options import Options
from ..recording.sketch import sketch
from ..recording.store import DAMAGE, FORMAT, Reader, Writer, opened, write
from ..report import Report, Row
from ..rows.decoding import name_of, stepwise
from ..rows.values import gradients, judged_by_size, same_structure, structure
from ..sides.flax.side import Flax
from ..sides.match import hidden
from ..sides.pair import Names, Pair, canonical, matches
from ..sides.run import Run, RunRequest, is_floating, rounded
from ..sides.steps import FlaxSteps, decoded, joined, output_of
from ..sides.torch.live import Live
from ..versions import versions
from .home import LIBRARY, is_from_this_library

Recorded = Any  # a Case, whose module imports this one


def path_of(case: Recorded) -> Path:
    """The file with a variant's goldens, in the package that defines the case.

    Goldens of this library's own cases are part of the library.

    Raises:
      ParityError: if the case is not defined in a file.
    """
    home = LIBRARY / "flax_attn" if case.home.is_own(case.flax_class) else case.home.folder
    return home / "goldens" / f"{case.variant}.safetensors"


def _read_from(case: Recorded) -> Path:
    """The file to read: the library's own for its layers in a case defined outside any file."""
    if is_from_this_library(case.flax_class) and not case.home.in_file:
        return LIBRARY / "flax_attn" / "goldens" / f"{case.variant}.safetensors"
    return path_of(case)


def record(cases: Sequence[Recorded]) -> Path:
    """Writes torch's results for the cases of one variant to its file, and returns the path.

    Raises:
      ParityError: if case names collide, a case cannot be compared, or writing fails.
    """
    modules: dict[str, list[str]] = {}
    for case in cases:
        modules.setdefault(str(case), []).append(case.home.module)
    for name, holders in modules.items():
        if len(holders) > 1:
            raise ParityError(
                f"{len(holders)} cases have one name, {name} (of {', '.join(holders)}): give each "
                "a name of its own, Case(name=...)."
            )

    def facts(writer: Writer) -> dict[str, Any]:
        entries = {str(case): _record_case(case, writer, str(i)) for i, case in enumerate(cases)}
        return {"format": FORMAT, "versions": versions(), "cases": entries}

    return write(path_of(cases[0]), facts, packed=True)


def _record_case(case: Recorded, writer: Writer, place: str) -> dict[str, Any]:
    torch_module, module = case.torch_module(), case.flax_module()
    results = {}
    options = Options(rules=case.rules, flax_call=case.flax_call)
    original = Live(torch_module, case.torch_call, _request(case, "float64"))
    pair = make_pair(original, module, options)
    for dtype in case.dtypes:
        _, (got, torch_run, truth) = next(pair.run(dtype, ["jit"]))
        facts, pieces = [], []
        entries = _results(got, torch_run, truth, pair.names, dtype)
        if case.decode is not None and case.decode.torch and dtype == case.dtypes[0]:
            runs = got, torch_run, truth
            entries = itertools.chain(entries, _steps(pair, case.decode, runs, dtype))
        for kind, name, want, scale, error in entries:
            pieces.append(sketch(name, want, _filled(kind, dtype)))
            facts.append([kind, name, int(pieces[-1].size), scale, error])
        results[dtype] = {
            "facts": facts,
            "numbers": writer.tensor(f"{place}/{dtype}", np.concatenate(pieces)),
            "keeps": _print_of(got),
            "outputs": structure(torch_run),
        }
    return {"sources": [source.to_json() for source in original.sources], "results": results}


def _results(got: Run, torch_run: Run, truth: Run, names: Names, dtype: str):
    """Yields kind, name, value, scale and torch's own error of everything that is recorded."""
    if dtype == "float64":
        for _, flax_name, match in matches(got, truth, names):
            yield "tap", flax_name, match.value, None, None
    for name, want in truth.outputs.items():
        if is_floating(want):
            sketches = sketch(name, torch_run.outputs[name], dtype), sketch(name, want, dtype)
            yield "output", name, want, None, judge.error(*sketches)
        else:
            yield "output", name, torch_run.outputs[name], None, None
    for name, want, scale, error in gradients(torch_run, truth, names, dtype):
        yield "gradient", name, want, scale, error


def _steps(pair: Pair, decode: Decode, runs: tuple[Run, Run, Run], dtype: str):
    """Yields the results of torch's own steps for each split, in the format of `_results`."""
    steps = decoded(pair, decode, runs, dtype, "jit")
    for cut in steps.cuts:
        torch_steps, want = (joined(x[cut].outputs, steps.axis) for x in (steps.torch, steps.truth))
        assert torch_steps is not None and want is not None  # `decoded` checks the token counts
        name = name_of(cut)
        sketches = sketch(name, torch_steps, dtype), sketch(name, want, dtype)
        yield "decode", name, want, None, judge.error(*sketches)


def _filled(kind: str, dtype: str) -> str:
    """The dtype whose fills count as 0 in a sketch, or ""."""
    return dtype if kind in ("output", "decode") else ""


def replay(case: Recorded, dtypes: Sequence[str], eager: bool) -> Report:
    """Compares the Flax side of a case with its golden.

    Raises:
      ParityError: if the case or one of `dtypes` was not recorded, or the record is damaged.
    """
    path = _read_from(case)
    package = "" if case.home.is_own(case.flax_class) else f" {shlex.quote(case.home.name)}"
    command = f"flax-attn parity --record {case.variant}{package}"
    remedy = f"run `{command}` where torch is installed"
    if not path.exists():
        old = path.with_suffix(".npz")
        what = f"{old} is of flax_attn 0.3, and this one does not read it"
        what = what if old.exists() else f"{case} is not recorded in {path.name}"
        raise ParityError(f"{what}: {remedy}.")
    facts, reader = opened(path, remedy)
    try:
        title = next((title for title in case.titles if title in facts["cases"]), None)
        entry = facts["cases"].get(title, {"sources": [], "results": {}})
        sources = [Source.from_json(fields) for fields in entry["sources"]]
        stored = entry["results"]
        results = {k: _recorded_values(stored[k], reader) for k in dtypes if k in stored}
        recorded = f"{facts['versions']['torch']} (recorded)"
    except DAMAGE as error:
        raise reader.damaged(error) from error
    if title is None:
        raise ParityError(f"{case} is not recorded in {path.name}: {remedy}.")
    missing = [dtype for dtype in dtypes if dtype not in results]
    if missing:
        raise ParityError(f"{case} is not recorded in {', '.join(missing)}: {remedy}.")
    module = case.flax_module()
    plan = make_plan(sources, module, case.rules)
    values = draw.parameters(case.seed, sources)
    rows: list[Row] = []
    for dtype, result in results.items():
        weights = canonical(plan.forward({k: rounded(v, dtype) for k, v in values.items()}), module)
        for mode in ("eager", "jit") if eager and dtype == "float64" else ("jit",):
            side = Flax(module, case.flax_call, _request(case, dtype), dtype, mode == "jit")
            run = side.run(weights)
            rows += _judge(run, result, dtype, mode)
            if case.decode is not None and dtype == dtypes[0] and mode == "jit":
                steps = FlaxSteps(side, weights, case.decode)
                rows += _judged_steps(steps, run, result, f"{case}", remedy)
    return Report(
        str(case),
        tuple(rows),
        params=sum(len(move.sources) for move in plan.moves),
        constants=plan.constants,
        versions={**versions(), "torch": recorded},
        reproduce=case.reproduce,
    )


def _recorded_values(result: Mapping[str, Any], reader: Reader) -> dict[str, Any]:
    """What is recorded in one dtype; its values are kind, name, scale, torch's error and sketch."""
    numbers, at, values = reader.tensor(result["numbers"]), 0, []
    for kind, name, size, scale, error in result["facts"]:
        values.append((kind, name, scale, error, numbers[at : at + size]))
        at += size
    return {"values": values, "keeps": result["keeps"], "outputs": result["outputs"]}


def _request(case: Recorded, dtype: str) -> RunRequest:
    inputs = {name: rounded(x, dtype) for name, x in case.arrays().items()}
    constants = frozenset(case.constants)
    return RunRequest((), inputs, case.seed, case.train, True, dtype == "float64", constants)


def _judge(run: Run, result: Mapping[str, Any], dtype: str, mode: str) -> Iterator[Row]:
    """Compares sketches; the dropout masks must equal those at recording time."""
    if _print_of(run) != result["keeps"]:
        note = "this jax draws other dropout masks than the one that recorded: record again"
        yield Row("keep", "exact", dtype, mode, judge.failed_fact(note))
        return
    yield same_structure(structure(run), result["outputs"], dtype, mode)
    taps = {k: hidden(x) if run.point(k) == "scores" else x for k, x in run.taps.items()}
    values = {"tap": taps, "output": run.outputs, "gradient": run.gradients}
    for kind, name, scale, error, want in result["values"]:
        if kind == "decode":
            continue
        value = values.get(kind, {}).get(name)
        if value is None:
            got = np.full(want.size, np.nan)
        else:
            got = sketch(name, value, _filled(kind, dtype))
        if kind == "output" and value is not None and not is_floating(value):
            verdict = judge.same_values(got, want)
        else:
            verdict = judged_by_size(got, want, dtype, scale, error, zero=kind == "gradient")
        yield Row(name, kind, dtype, mode, verdict)


def _judged_steps(
    steps: FlaxSteps, run: Run, result: Mapping[str, Any], what: str, remedy: str
) -> Iterator[Row]:
    """Compares Flax's steps with the recorded ones of torch, or with its full forward pass.

    In float64 also with Flax's own full forward pass, which locates the first step that differs.
    """
    dtype, mode = steps.side.dtype, "jit" if steps.side.jit else "eager"
    axis = steps.axes[steps.first]
    output = output_of(run.outputs, steps.tokens, axis)
    recorded = {(kind, name): rest for kind, name, *rest in result["values"]}
    for cut in steps.decode.checked(steps.request.arrays()):
        outputs = steps.run(cut).outputs
        kind, name = ("decode", name_of(cut)) if steps.decode.torch else ("output", output)
        if (kind, name) not in recorded:
            raise ParityError(f"{what} is not recorded step by step ({cut}): {remedy}.")
        (scale, error, want), value = recorded[kind, name], joined(outputs, axis)
        got = np.full(want.size, np.nan) if value is None else sketch(name, value, dtype)
        if dtype == "float64":
            whole = [*cut.pieces(run.outputs[output], axis)]
            own_whole, _ = stepwise(cut, axis, outputs, whole, whole, dtype)
            yield Row(f"{name_of(cut)}, Flax's whole", "decode", dtype, mode, own_whole)
        verdict = judged_by_size(got, want, dtype, scale, error)
        yield Row(name_of(cut), "decode", dtype, mode, verdict)


def _print_of(run: Run) -> list[int]:
    return [zlib.crc32(np.packbits(keep).tobytes()) for keep in run.keeps]
