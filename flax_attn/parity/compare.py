"""`compare` and `assert_parity`: two modules, the same weights and inputs, everything compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
from flax import nnx

from . import draw, judge
from .carry import flax_values, set_flax
from .errors import ParityError
from .flax_side import run_flax, unique_params
from .mapping import Plan, make_plan
from .report import Report, Row
from .rule import Rule
from .run import Request, Run, is_floating, rounded
from .source import Source, describe, read
from .torch_side import run_torch

Weights = Literal["random", "given", "as_is"]
DTYPES = ("float64", "float32", "bfloat16", "float16")


def compare(
    torch_module: Any,
    flax_module: nnx.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] = ("float64", "float32"),
    grads: bool = True,
    taps: bool = True,
    eager: bool = True,
    jit: bool = True,
    train: bool = False,
    weights: Weights = "random",
    rules: Sequence[Rule] = (),
    seed: int = 0,
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    title: str = "",
    reproduce: str = "",
) -> Report:
    """Runs both modules on the same weights and inputs and compares everything they do.

    In float64 outputs, taps and gradients must agree to 1e-12 in norm; in narrower dtypes the error
    against the float64 truth may be k times torch's own. Neither module is changed. In float64 Flax
    runs eagerly and under jit, in narrower dtypes under jit.

    Args:
      torch_module: the original.
      flax_module: the port, an nnx module.
      inputs, kwargs: arguments of both calls; numpy arrays are inputs, and floating ones are
        differentiated; anything else is passed as it is.
      dtypes: of "float64", "float32", "bfloat16", "float16"; inputs and weights are rounded first.
      grads: whether gradients of inputs and parameters are compared, by a random cotangent.
      taps: whether submodules' outputs, scores and weights are compared.
      eager, jit: whether Flax runs eagerly and under jit; one of them at least.
      train: both in train mode; JAX draws the dropout masks and torch repeats them.
      weights: "random" draws new ones for both, "given" carries torch's as they are, "as_is"
        carries nothing.
      rules: what names and types do not say about the mapping.
      seed: of weights and cotangents.
      torch_call, flax_call: called as `call(module, *inputs, **kwargs)` in place of the module.
      title, reproduce: for the report.

    Returns:
      A `Report`; `report.ok` says whether all is equal.

    Raises:
      ParityError: if the two cannot be mapped onto each other.
      ValueError: for a dtype or a kind of weights that does not exist.

    Example (needs torch):

        compare(torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0)), np.ones((4, 3)))
    """
    _check_knobs(dtypes, weights, eager or jit)
    request = Request(inputs, dict(kwargs or {}), seed, train, grads, taps)
    sources = describe(torch_module)
    plan = None if weights == "as_is" else make_plan(sources, flax_module, rules)
    values = draw_weights(sources, seed) if weights == "random" else read(torch_module)
    calls = (torch_call or _plain_call, flax_call or _plain_call)
    names = _Names(plan, flax_module, rules)
    rows, unpaired = list(_exact(plan, flax_module, values)), {}
    for dtype in dtypes:
        modes = _modes(eager, jit)
        found = _run(torch_module, flax_module, calls, request, plan, values, dtype, modes)
        for mode, (got, own, truth) in found.items():
            rows += judged(got, own, truth, names, dtype, mode)
            unpaired |= dict.fromkeys(names.unpaired(got.taps, truth.taps))
    title = title or f"{type(flax_module).__name__} against {type(torch_module).__name__}"
    return Report(title, tuple(rows), **_facts(plan), unpaired=tuple(unpaired), reproduce=reproduce)


def _facts(plan: Plan | None) -> dict[str, Any]:
    """What a report says of the mapping, and by which versions."""
    if plan is None:
        return {"versions": versions()}
    return {
        "params": sum(len(move.sources) for move in plan.moves),
        "constants": plan.constants,
        "notes": tuple(f"{name}: skipped by rule" for name in plan.skipped),
        "versions": versions(),
    }


def assert_parity(
    torch_module: Any, flax_module: nnx.Module, *inputs: Any, **options: Any
) -> Report:
    """`compare`, with the same arguments, raising unless all is equal.

    Raises:
      ParityError: an AssertionError whose text is the report, which is its `report` too.
    """
    report = compare(torch_module, flax_module, *inputs, **options)
    if not report.ok:
        raise ParityError(str(report), report)
    return report


def draw_weights(sources: Sequence[Source], seed: int) -> dict[str, np.ndarray]:
    """Random values for every described parameter, tied ones equal; buffers are left out."""
    return {
        s.name: draw.parameter(seed, s.same_as or s.name, s.kind, s.shape)
        for s in sources
        if s.kind != "buffer"
    }


def versions() -> dict[str, str]:
    """Of torch (or "missing"), jax, flax and numpy."""
    found = {}
    for name in ("torch", "jax", "flax", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _check_knobs(dtypes: Sequence[str], weights: str, runs: bool) -> None:
    if not runs:
        raise ValueError("Flax must run eagerly or under jit; got eager=False, jit=False.")
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if isinstance(dtypes, str) or wrong or not dtypes:
        raise ValueError(f"dtypes must be some of {', '.join(DTYPES)}; got {dtypes!r}.")
    if weights not in ("random", "given", "as_is"):
        raise ValueError(f'weights must be "random", "given" or "as_is"; got {weights!r}.')


def _exact(plan: Plan | None, module: nnx.Module, values: dict[str, np.ndarray]) -> list[Row]:
    """The exact statements about weights: there and back again, bit for bit."""
    if plan is None:
        return []
    copy = nnx.clone(module)
    carried = {k: v.astype(np.float32) if is_floating(v) else v for k, v in values.items()}
    set_flax(copy, plan.forward(carried), np.float32)
    back = plan.back(flax_values(copy))
    return [
        Row(name, "exact", "", "", judge.exact(value, carried[name]))
        for name, value in back.items()
    ]


def _run(torch_module, flax_module, calls, request, plan, values, dtype, modes):
    """Flax in each of `modes`, then torch in `dtype` and in float64, dropping what Flax dropped.

    Narrow dtypes run in the last mode alone, under jit, which is how they are used: each eager
    operation is compiled by itself, and float64 shows that both ways are the same function.
    """
    narrow = {name: rounded(x, dtype) for name, x in values.items()}
    weights = canonical(plan.forward(narrow), flax_module) if plan else {}
    inputs = {name: rounded(x, dtype) for name, x in request.arrays().items()}
    args, kwargs = request.fill(inputs)
    request = replace(request, args=args, kwargs=kwargs)
    modes = modes if dtype == "float64" else modes[-1:]
    got = {m: run_flax(flax_module, calls[1], request, weights, dtype, m == "jit") for m in modes}
    keeps = got[modes[0]].keeps
    own = run_torch(torch_module, calls[0], request, narrow, dtype, keeps)
    truth = own
    if dtype != "float64":
        truth = run_torch(torch_module, calls[0], request, narrow, "float64", keeps)
    return {mode: (run, own, truth) for mode, run in got.items()}


def _modes(eager: bool, jit: bool) -> list[str]:
    return ["eager"] * eager + ["jit"] * jit


def canonical(values: Mapping[str, np.ndarray], module: nnx.Module) -> dict[str, np.ndarray]:
    """`values` by the first path of each Param, where one is shared."""
    first = unique_params(module)
    return {first[path]: value for path, value in values.items()}


class _Names:
    """Torch's names of taps and gradients, told in Flax's."""

    def __init__(self, plan: Plan | None, module: nnx.Module, rules: Sequence[Rule]):
        self.plan, self.module = plan, module
        self.rules = [r for r in rules if r.kind == "move" and r.layout is None]

    def tap(self, name: str) -> str:
        for rule in self.rules:
            for (here, *_), (there, *_) in rule.groups([name]):
                if here == name:
                    return there
        return name

    def gradients(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = {k: v for k, v in found.items() if k.startswith("input ")}
        if self.plan is None:
            return inputs
        names = {name for move in self.plan.moves for name in move.sources}
        params = {k: v for k, v in found.items() if k in names}
        return inputs | canonical(self.plan.forward(params), self.module)

    def unpaired(self, got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
        told = {self.tap(name) for name in want}
        return [f"{n} (Flax)" for n in got if n not in told] + [
            f"{n} (torch)" for n in want if self.tap(n) not in got
        ]


def judged(got: Run, own: Run, truth: Run, names: _Names, dtype: str, mode: str) -> list[Row]:
    """Every comparison of one run: taps in torch's call order, outputs, gradients."""
    rows = []

    def add(kind, name, a, b, c):
        if dtype == "float64":
            verdict = judge.same_function(a, c)
        else:
            verdict = judge.same_precision(a, b, c, dtype)
        rows.append(Row(name, kind, dtype, mode, verdict))

    for name, want in truth.taps.items() if dtype == "float64" else ():
        there = names.tap(name)
        if there in got.taps:
            value = got.taps[there]
            if value.shape[-2:] == want.shape[-2:] and value.size == want.size:
                value = value.reshape(want.shape)
            add("tap", there, value, want, want)
    rows.append(same_structure(structure(got), structure(own), dtype, mode))
    for name, want in truth.outputs.items():
        if name in got.outputs and is_floating(want):
            add("output", name, got.outputs[name], own.outputs[name], want)
        elif name in got.outputs:
            verdict = judge.exact(got.outputs[name], own.outputs[name])
            rows.append(Row(name, "output", dtype, mode, verdict))
    return rows + (_judged_gradients(got, own, truth, names, dtype, mode) if got.gradients else [])


def gradients(own: Run, truth: Run, names: _Names, dtype: str):
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


def same_structure(got: dict[str, str], want: dict[str, str], dtype: str, mode: str) -> Row:
    """Exact facts about the outputs: their names, shapes and dtypes."""
    verdict = judge.Verdict("exact", 0.0, 0.0)
    if got != want:
        note = f"Flax returns {got}, torch {want}"
        verdict = judge.Verdict("exact", float("inf"), 0.0, note=note)
    return Row("names, shapes, dtypes", "exact", dtype, mode, verdict)
