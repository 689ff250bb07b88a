"""`compare` and `assert_parity`: run two sides on equal weights and compare all their values."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
from flax import nnx

from ..errors import ParityError
from ..weights.known_layers import flax_state, flax_values, get_path, may_keep
from ..weights.mapping import some
from ..weights.plan import make_plan, same_tree
from ..weights.rule import Rule
from . import judge
from .call_spec import CallSpec, or_default
from .decode import Decode
from .diagnosis.local_error import diagnosed
from .options import Options, Weights
from .port import set_flax
from .recording.recording import original_of
from .repeated import together
from .report import Report, Row
from .rows import decoding
from .rows.draws import draws
from .rows.state import states
from .rows.training import stepped, trained
from .rows.values import (
    constant_outputs,
    ineffective_weights,
    judged,
    other_shapes,
    unpaired,
    unused_rules,
)
from .rows.warnings import warnings
from .side_checks import arguments, check_sides
from .side_names import SIDES, all_worded, side_names, worded_errors
from .sides.calls import Function, as_side, name_of, user_line
from .sides.flax.side import NotWide
from .sides.match import matching_taps
from .sides.original import Original
from .sides.pair import Names, Pair
from .sides.run import MODEL_OUTPUT, OUTPUT, Run
from .sides.steps import Decoded, check_decode, decoded
from .sides.torch.buffers import unrounded
from .versions import versions
from .watch import Watch

# A float64 error above this multiple of the first noise run's change is not measured again.
NOISE_MARGIN = 100.0

SAME_OBJECT = "both sides are one object, which is equal to itself whatever it computes"


def compare(
    torch_module: Any,
    flax_module: nnx.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    dtypes: Sequence[str] | None = None,
    grads: bool = True,
    taps: bool = True,
    eager: bool = True,
    jit: bool = True,
    train: bool | None = None,
    constants: Sequence[str] = (),
    noise: bool = False,
    optimizer: tuple[str, Mapping[str, Any]] | None = None,
    steps: int = 1,
    weights: Weights | None = None,
    rules: Sequence[Rule] = (),
    seed: int | None = None,
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    decode: Decode | None = None,
    title: str = "",
    reproduce: str = "",
) -> Report:
    """Runs both sides on the same weights and inputs and compares everything they do.

    In float64, outputs, taps and gradients must agree to 1e-12 in norm. In narrower dtypes, the
    error against the float64 result may be k times torch's own. Neither module is changed. Flax
    runs eagerly and under jit in float64, and only under jit in narrower dtypes; the outputs of the
    eager run, and of an original in JAX, are those of a call on arrays, without any tracer.

    Args:
      torch_module: the original, which is the truth: a torch module or function, an nnx module or
        a JAX function, or a `Recording` of one. A recording supplies the inputs, dtypes, seed,
        weights and optimizer it was made with as defaults; other values raise an error.
      flax_module: the port, rewrite or kernel: an nnx module or a JAX function.
      inputs, kwargs: arguments of both calls; numpy and JAX arrays are inputs, also inside tuples,
        lists, dicts and dataclasses, and floating ones are differentiated. Other objects are
        passed unchanged.
      dtypes: any of "float64", "float32", "bfloat16", "float16"; inputs and weights are first
        rounded to each. None means float64 and float32.
      grads: whether gradients of inputs and parameters are compared, using a random cotangent.
      taps: whether submodule outputs, attention scores and attention weights are compared.
      eager, jit: whether Flax runs eagerly and under jit; at least one must be True.
      train: whether both run in train mode. JAX draws the dropout masks and torch reuses them;
        with a recording, torch drew them and JAX reuses them.
      constants: inputs that are not differentiated, such as a float mask: keywords, or positions
        such as "0"; inside containers "cache.k", or "cache" for all of it.
      noise: whether torch's own rounding noise is reported next to every error, in every dtype;
        in float64 it is always measured where a limit is exceeded.
      optimizer, steps: a name and torch's options, `("adamw", dict(lr=1e-3))`, and the number of
        steps of torch.optim and optax to compare, parameter by parameter, in float64.
      weights: "random" draws new weights for both, "given" copies torch's, "as_is" copies
        nothing. None means "random", and "as_is" where a JAX function is a side. Two nnx modules
        exchange weights by equal paths.
      rules: the part of the weight mapping that does not follow from names and types.
      seed: for weights and cotangents; None means 0.
      torch_call, flax_call: called as `call(module, *inputs, **kwargs)` instead of the module.
      decode: how to also run both step by step with their caches, in the first of `dtypes`.
      title, reproduce: the report's title, and the command shown for reproducing it.

    Returns:
      A `Report`; `report.ok` says whether everything is equal.

    Raises:
      ParityError: if the weights cannot be mapped, or a recording lacks a requested option.
      ValueError: for an unknown dtype or kind of weights.

    >>> import torch
    >>> theirs, mine = torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> compare(theirs, mine, np.ones((4, 3)), dtypes=("float64",)).ok
    True
    >>> import jax
    >>> slow, x = lambda x: x / (1 + abs(x)), np.linspace(-2, 2, 9)
    >>> compare(slow, jax.nn.soft_sign, x, dtypes=("float64",)).verdict
    'equal'
    """
    torch_module = check_sides(torch_module, flax_module)
    call = arguments(inputs, kwargs)
    call_spec = CallSpec(*call, constants, seed, train, grads, taps, torch_call)
    is_same = torch_module is flax_module and torch_call is flax_call
    original, flax_module = original_of(torch_module, call_spec), as_side(flax_module)
    training = original.training if optimizer is None else (optimizer, steps)
    dtypes, weights = or_default(dtypes, original.dtypes), _weights(original, flax_module, weights)
    options = Options(dtypes, eager, jit, noise, *training, weights, rules, flax_call, decode)
    original.check(options)
    check_decode(decode, flax_module, options.call, original.request)
    pair = make_pair(original, flax_module, options, title)
    with pair.watch, worded_errors(pair.sides):
        builder = _ReportBuilder(pair, options, [SAME_OBJECT] * is_same)
        builder.run()
        return builder.report(reproduce)


class _ReportBuilder:
    """Collects the contents of a report: rows, unpaired taps and notes."""

    def __init__(self, pair: Pair, options: Options, notes: Sequence[str]):
        self.pair, self.options = pair, options
        self.rows: list[Row] = [*_exact(pair), *trained(pair)]
        self.notes = dict.fromkeys((*pair.original.notes, *notes))
        self.noisy: dict[str, tuple[list[Run], Iterator[Run]]] = {}
        self.alone: dict[str, None] = {}
        self.runs: dict[tuple[str, str], tuple[Run, Run, Run]] = {}
        self.steps: tuple[Decoded, list[decoding.CutComparison]] | None = None
        self.unrounded: Run | None = None

    def run(self) -> None:
        """Runs both sides in every dtype, then decoding and optimizer steps if requested."""
        options = self.options
        for dtype in options.dtypes:
            try:
                self.run_in(dtype)
            except NotWide as error:
                if len(options.dtypes) == 1:
                    line = user_line(error.__cause__)
                    raise ParityError(f"{error}. {line}".rstrip()) from error.__cause__
                self.notes[f"not compared in float64: {error}"] = None
        if options.decode is not None:
            self.decode(options.decode, options.dtypes[0], options.modes[-1])
        if options.optimizer is not None:
            steps, mode = options.steps, options.modes[-1]
            stepped(self.pair, options.optimizer, steps, mode, self.rows, self.notes)

    def run_in(self, dtype: str) -> None:
        """Runs both sides in one dtype."""
        for mode, runs in self.pair.run(dtype, self.options.modes):
            self.add(runs, dtype, mode)
            del runs  # frees memory before the next runs

    def add(self, runs: tuple[Run, Run, Run], dtype: str, mode: str) -> None:
        if dtype == "float64" and self.unrounded is not None:
            runs = runs[0], self.unrounded, self.unrounded
        rows = self._judged(runs, dtype, mode)
        if dtype == "float64" and self.unrounded is None and _decided_against(rows):
            runs = self._unround(runs)
            rows = self._judged(runs, dtype, mode) if self.unrounded is not None else rows
        pair = self.pair
        got, torch_run, truth = runs
        right = not any(row.verdict.differs for row in rows)
        # Gradients are as large as the model; only the diagnosis of a difference needs them.
        visible_runs = (replace(run, gradients={}) for run in runs) if right else runs
        self.runs[dtype, mode] = cast(tuple[Run, Run, Run], tuple(visible_runs))
        self.rows += rows
        states(pair, got, torch_run, dtype, mode, self.rows, self.notes)
        draws(pair, got, torch_run, self.rows, self.notes)
        if dtype == "float64" or ("float64", mode) not in self.runs:
            # Values in narrow dtypes are too coarse to pair taps or to infer layouts.
            matching = matching_taps(got, truth, pair.names.tap)
            self.alone |= dict.fromkeys(unpaired(got, truth, matching))
            self.notes |= dict.fromkeys(other_shapes(got, truth, matching))
            self.notes |= dict.fromkeys(unused_rules(got, truth, pair.names))
            self.notes |= dict.fromkeys(ineffective_weights(got, truth, pair.names))
            self.notes |= dict.fromkeys(constant_outputs(got, truth) if right else ())
            self.notes |= dict.fromkeys(_not_dropped(pair, self.alone))
            self.notes |= dict.fromkeys(_same_paddings(pair) if right else ())
        self.notes |= dict.fromkeys((*got.notes, *torch_run.notes, *truth.notes))
        if pair.draws_alone:
            self.notes |= dict.fromkeys(_draws_by_itself(got, torch_run))

    def _judged(self, runs: tuple[Run, Run, Run], dtype: str, mode: str) -> list[Row]:
        """Judges one run, allowing in float64 for torch's own rounding noise."""
        got, torch_run, truth = runs
        noisy = self._noisy(torch_run, dtype) if self.options.noise else ()
        judge_rows = partial(judged, library=self.pair.original.library)
        rows = judge_rows(got, torch_run, truth, self.pair.names, dtype, mode, noisy)
        if dtype == "float64" and not noisy and _decided_against(rows):
            for count in (1, None):  # one noise run confirms a large difference
                noisy = self._noisy(torch_run, dtype, count)
                rows = judge_rows(got, torch_run, truth, self.pair.names, dtype, mode, noisy)
                if not any(map(_noise_could_excuse, rows)):
                    break
        return rows

    def _unround(self, runs: tuple[Run, Run, Run]) -> tuple[Run, Run, Run]:
        """Replaces torch's runs by ones with unrounded buffers, if those explain a difference."""
        got, _, truth = runs
        self.pair.watch.at("torch in float64, its rounded buffers")
        explained = unrounded(self.pair, got, truth)
        if explained is None:
            return runs
        self.pair = replace(self.pair, original=explained.original)
        self.notes |= dict.fromkeys(explained.notes)
        self.noisy.pop("float64", None)
        self.unrounded, _ = explained.original.run("float64", truth.keeps)
        return got, self.unrounded, self.unrounded

    def decode(self, spec: Decode, dtype: str, mode: str) -> None:
        """Runs both sides step by step, each with its cache."""
        runs = self.runs[dtype, mode]
        steps = decoded(self.pair, spec, runs, dtype, mode)
        decode_rows = decoding.comparisons(steps, runs, dtype, mode)
        if dtype == "float64" and _decided_against([each.row for each in decode_rows]):
            decode_rows = decoding.comparisons(
                steps, runs, dtype, mode, self._noisy(runs[1], dtype)
            )
        self.steps = steps, decode_rows
        self.rows += [each.row for each in decode_rows]
        self.notes |= dict.fromkeys(decoding.notes(steps, runs[2]))

    def _noisy(self, torch_run: Run, dtype: str, count: int | None = None) -> list[Run]:
        """Torch's runs in `dtype` with perturbed rounding: `count`, or all; cached."""
        if dtype not in self.noisy:
            self.pair.watch.at(f"torch in {dtype}, its rounding noise")
            self.noisy[dtype] = [], self.pair.original.noisy(dtype, torch_run.keeps)
        made, more = self.noisy[dtype]
        made += islice(more, None if count is None else max(count - len(made), 0))
        return made

    def report(self, reproduce: str) -> Report:
        """The report, with a diagnosis if something differs."""
        sides = self.pair.sides
        title = self.pair.watch.title
        report = Report(title, **self.facts(), reproduce=reproduce, sides=sides)
        if report.failed:
            report = diagnosed(self.pair, report, self.runs, self.steps)
        return all_worded(report, sides, keep=("title", "reproduce", "maps", "sides").__contains__)

    def facts(self) -> dict[str, Any]:
        """The report's fields, including notes on the weight mapping."""
        plan = self.pair.plan
        skipped = plan.skipped if plan else ()
        return {
            "rows": tuple(self.rows),
            "params": sum(len(move.sources) for move in plan.moves) if plan else 0,
            "constants": plan.constants if plan else (),
            "notes": (
                *(f"{name}: skipped by rule" for name in skipped),
                *_uncarried(self.pair),
                *self.notes,
                *warnings(self.rows),
            ),
            "unpaired": tuple(self.alone),
            "versions": {**versions(self.pair.original.library), **self.pair.original.versions},
            "noise": self.options.noise,
        }


def _uncarried(pair: Pair) -> Iterator[str]:
    """Notes on variables of Flax's own with the shape of a buffer of another name."""
    constants = pair.plan.constants if pair.plan else ()
    targets = {path for move in pair.plan.moves for path in move.targets} if pair.plan else {}
    buffers = [x for x in pair.original.sources if x.name in constants and "float" in x.dtype]
    for path, variable in flax_state(pair.flax_module).items() if buffers else ():
        names = [x.name for x in buffers if may_keep(variable, x.shape)]
        if names and path not in targets:
            yield (
                f"{path} of Flax keeps its own value: if it is {names[0]} of torch, which is not "
                f'carried, say Rule("{names[0]} -> {path}")'
            )


def _same_paddings(pair: Pair) -> Iterator[str]:
    """Notes on strided convolutions of Flax that pad by the size of their input."""
    for move in pair.plan.moves if pair.plan else ():
        path, _, leaf = move.targets[0].rpartition(".")
        layer, part = get_path(pair.flax_module, path), move.sources[0].rpartition(".")[0]
        is_same = isinstance(layer, nnx.Conv) and layer.padding == "SAME" and leaf == "kernel"
        if is_same and np.max(layer.strides or 1) > 1 and part in pair.original.modules:
            fixed = pair.original.modules[part].settings.get("padding")
            if isinstance(fixed, tuple) and any(fixed):
                yield (
                    f"{path} of Flax pads SAME, by its input's size and stride, torch always "
                    f"{fixed}: equal at this size, another padding at others, as odd for even"
                )


def _draws_by_itself(got: Run, first: Run) -> list[str]:
    """A note on random numbers that both sides draw, each by itself."""
    lines = dict.fromkeys(x for run in (got, first) for x in run.findings.get("random", ()))
    if not lines:
        return []
    return [
        f"{some(list(lines))}: this compares one draw, and two sides are equal only where they "
        "draw the same numbers from the same key in the same order"
    ]


def _not_dropped(pair: Pair, alone: Iterable[str]) -> list[str]:
    """Note on torch dropouts that are off in eval mode and have no Flax counterpart."""
    if pair.request.train:
        return []
    drops = {f"{name} (torch)" for name in pair.original.dropouts}
    names = [name.removesuffix(" (torch)") for name in alone if name in drops]
    few = some(together(names))
    sentence = f"torch has dropout ({few}) that Flax does not show: it is off in eval mode"
    return [f"{sentence}, train=True compares it"] if names else []


def _noise_could_excuse(row: Row) -> bool:
    """Whether measuring more of torch's rounding noise could still excuse a difference."""
    return row.verdict.differs and row.verdict.error < NOISE_MARGIN * (row.verdict.noise or 0.0)


def _decided_against(rows: Sequence[Row]) -> bool:
    """Whether an output or gradient exceeds its limit by a finite error."""
    kinds = ("output", "gradient", "decode")
    return any(
        row.kind in kinds and np.isfinite(row.verdict.error) and row.verdict.differs for row in rows
    )


def make_pair(
    original: Original, flax_module: nnx.Module, options: Options, title: str = ""
) -> Pair:
    """Builds a `Pair`: both sides, the weight mapping between them, and weights for both."""
    rules, weight_strategy = options.rules, options.weights
    parts = [*original.parts]
    plan = (
        None
        if weight_strategy == "as_is"
        else same_tree(original.sources, flax_module)
        if original.library == "jax"
        else make_plan(original.sources, flax_module, rules, parts)
    )
    names = Names(plan, flax_module, rules)
    original = original.with_weights(weight_strategy, plan)
    if OUTPUT in parts or (OUTPUT,) in (path for path, _ in nnx.iter_modules(flax_module)):
        original = original.with_output(MODEL_OUTPUT)
    names_of_both = original.name, name_of(flax_module)
    sides = SIDES if original.library == "torch" else side_names(*names_of_both)
    first, second = names_of_both if original.library == "torch" else sides
    watch = Watch(title or f"{second} against {first}", original.values)
    return Pair(original, flax_module, options.call, original.request, plan, names, watch, sides)


def assert_parity(
    torch_module: Any, flax_module: nnx.Module, *inputs: Any, **options: Any
) -> Report:
    """Runs `compare` with the same arguments and raises unless everything is equal.

    Args:
      torch_module, flax_module, inputs, options: as for `compare`.

    Returns:
      The report.

    Raises:
      ParityError: an AssertionError; its text is the report, also available as `error.report`.

    >>> import torch
    >>> theirs, mine = torch.nn.Tanh(), nnx.Sequential(nnx.relu)
    >>> assert_parity(theirs, mine, np.ones((4, 3)), dtypes=("float64",))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    flax_attn.errors.ParityError: ...
    """
    report = compare(torch_module, flax_module, *inputs, **options)
    if not report.ok:
        raise ParityError(str(report), report)
    return report


def _weights(original: Original, flax_module: nnx.Module, requested: Weights | None) -> Weights:
    """The kind of weights; nothing is carried to or from a function, which has none."""
    has_none = isinstance(flax_module, Function) or not original.sources
    if original.library == "torch" or not has_none:
        return or_default(requested, original.weights)
    if requested not in (None, "as_is"):
        raise ValueError(
            f"weights are carried between two nnx modules; a JAX function takes its own as inputs: "
            f'leave weights= out, or weights="as_is"; got {requested!r}.'
        )
    return "as_is"


def _exact(pair: Pair) -> list[Row]:
    """Rows checking that weights survive the round trip torch -> Flax -> torch bit for bit."""
    if pair.plan is None:
        return []
    copy = nnx.clone(pair.flax_module)
    carried = pair.narrow("float32")
    set_flax(copy, pair.plan.forward(carried), np.float32)
    back = pair.plan.back(flax_values(copy))
    return [
        Row(name, "exact", "", "", judge.exact(value, carried[name]))
        for name, value in back.items()
    ]
