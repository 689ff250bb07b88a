"""The torch side as a live module, run whenever the comparison needs it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ....weights.described import Source
from ....weights.plan import Plan
from ... import draw
from ...torch_module import describe, part_of, read, to_numpy, to_torch
from ..calls import ITSELF, errors_of
from ..libraries import libraries
from ..original import Arrays, Part, Stepped
from ..run import Run, RunRequest, narrowed
from ..steps import TorchSteps
from ..tape import Tape
from .noise import RUNS as NOISY
from .noise import RoundingMove
from .recorder import is_inexact
from .side import run_torch, wrong_dtype_buffers


@dataclass(frozen=True)
class Live:
    """An `Original` backed by a torch module.

    Attributes:
      module: the torch module, never modified.
      call: function that calls it.
      request: the call's arguments, and what to compute.
      values: weights to load into it; if empty, its own.
      unrounded: buffers to load in float64 runs.
    """

    module: Any
    call: Callable[..., Any]
    request: RunRequest
    values: Arrays = field(default_factory=dict)
    unrounded: Arrays = field(default_factory=dict)
    keeps: None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    weights: Literal["random"] = "random"
    training: tuple[None, int] = (None, 1)
    versions: Mapping[str, str] = field(default_factory=dict)
    library: Literal["torch"] = "torch"

    def check(self, options: Any) -> None:
        """Does nothing: a live module supports every option."""

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def sources(self) -> list[Source]:
        return describe(self.module)

    @property
    def parts(self) -> list[str]:
        return [name for name, _ in self.module.named_modules(remove_duplicate=False) if name]

    @property
    def modules(self) -> Mapping[str, Part]:
        named = self.module.named_modules(remove_duplicate=False)
        return {name: part_of(module) for name, module in named}

    @property
    def trained(self) -> Mapping[str, bool | None]:
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: x.requires_grad if is_inexact(x) else None for name, x in named}

    @property
    def dropouts(self) -> list[str]:
        named = self.module.named_modules()
        return [n for n, m in named if "Dropout" in type(m).__name__ and getattr(m, "p", 0)]

    @property
    def notes(self) -> list[str]:
        """Notes on submodules that call JAX, or were in another mode than the rest."""
        named, notes = dict(self.module.named_modules()), []
        for name, part in named.items():
            functions = (type(part).forward, *filter(callable, vars(part).values()))
            if any("jax" in libraries(x, helpers=False) for x in functions):
                notes.append(f"{name or self.name} of torch names JAX in its code: {ITSELF}")
        other = [name for name in named if named[name].training != self.module.training]
        if other:
            few = ", ".join(other[:3]) + (" and others" if len(other) > 3 else "")
            mode = "train" if self.request.train else "eval"
            notes.append(
                f"{few} of torch came in another mode than the rest: all ran in {mode} mode"
            )
        return notes

    def stored(self) -> Arrays:
        """The module's own tensors by name."""
        return read(self.module)

    def with_weights(self, strategy: str, plan: Plan | None) -> "Live":
        skipped = plan.skipped if plan else ()
        drawn = draw.parameters(self.request.seed, self.sources) if strategy == "random" else {}
        if not drawn:
            return replace(self, values=read(self.module))
        values = {name: x for name, x in drawn.items() if name not in skipped}
        # Only parameters are drawn; buffers that the plan moves keep the module's values.
        moves = plan.moves if plan else ()
        carried = {name for move in moves for name in move.sources} - values.keys()
        built = read(self.module) if carried else {}
        return replace(self, values=values | {k: v for k, v in built.items() if k in carried})

    def with_output(self, name: str) -> "Live":
        return replace(self, request=replace(self.request, output=name))

    def run(self, dtype: str, keeps: Sequence[np.ndarray]) -> tuple[Run, Run]:
        torch_run = self.alone(dtype, keeps)
        truth = torch_run if dtype == "float64" else self.truth(dtype, keeps)
        return torch_run, truth

    def alone(self, dtype: str, keeps: Sequence[np.ndarray] | None) -> Run:
        """Runs torch in `dtype`; if `keeps` is None its dropout draws its own masks."""
        return self._run(dtype, narrowed(self.values, dtype), keeps)

    def truth(self, dtype: str, keeps: Sequence[np.ndarray]) -> Run:
        """Runs torch in float64 with weights and inputs rounded to `dtype`."""
        return self._run(dtype, narrowed(self.values, dtype), keeps, "float64")

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> Iterator[Run]:
        # Indices and comparisons must be those of a run without noise, which is recorded first.
        values, quiet = narrowed(self.values, dtype), RoundingMove(None)
        self._run(dtype, values, keeps, moved=quiet)
        for seed in range(NOISY):
            yield self._run(dtype, values, keeps, moved=RoundingMove(seed, quiet.decided))

    def buffers(self) -> dict[str, np.ndarray]:
        return {name: to_numpy(x) for name, x in self.module.named_buffers(remove_duplicate=False)}

    def with_buffers(self, values: Arrays) -> "Live":
        return replace(self, unrounded=values)

    def quick(self, keeps: Sequence[np.ndarray]) -> Run:
        quick = replace(self, request=replace(self.request, grads=False))
        return quick.alone("float64", keeps)

    def program(self, truth: Run) -> Tape:
        tape = Tape()
        self._run("float64", narrowed(self.values, "float64"), truth.keeps, tape=tape)
        return tape

    def steps(self, optimizer: Any, count: int, keeps: Sequence[np.ndarray]) -> Iterator[Stepped]:
        values = narrowed(self.values, "float64")
        firsts = dict(self.module.named_parameters())
        trained = [k for k in firsts if k in values and self.trained[k] is not None]
        params = {k: to_torch(values[k]).requires_grad_() for k in trained}
        torch_optimizer = optimizer.torch(list(params.values()))
        ties = {source.name: source.same_as for source in self.sources if source.same_as}
        for _ in range(count):
            run = self._run("float64", values, keeps)
            for name, param in params.items():
                # None rather than zero: an optimizer skips such parameters, weight decay included.
                known = name in run.gradients
                param.grad = to_torch(run.gradients[name]) if known else None
            torch_optimizer.step()
            values = {**values, **{name: to_numpy(param) for name, param in params.items()}}
            # Tied weights are one parameter, of which the optimizer updated the first name.
            values |= {k: values[first] for k, first in ties.items() if first in values}
            yield Stepped(run.gradients, values)

    def decoded(self, decode: Any, cuts: Sequence[Any], dtype: str) -> tuple[dict, dict]:
        if decode.torch is None:
            return {}, {}
        values, request = narrowed(self.values, dtype), self.request.in_dtype(dtype)
        wide = TorchSteps(self.module, request, {**values, **self.unrounded}, decode)
        if dtype == "float64":
            truth = {cut: wide.run(cut, dtype) for cut in cuts}
            return truth, truth
        side = TorchSteps(self.module, request, values, decode)
        truth = {cut: wide.run(cut, "float64", True) for cut in cuts}
        return {cut: side.run(cut, dtype) for cut in cuts}, truth

    def _run(
        self,
        dtype: str,
        values: Arrays,
        keeps: Sequence[np.ndarray] | None,
        at: str = "",
        moved: RoundingMove | None = None,
        tape: Tape | None = None,
    ) -> Run:
        """Runs torch in `dtype`, or in `at` with weights and inputs rounded to `dtype`."""
        request, made_in = self.request.in_dtype(dtype), at or dtype
        values = {**values, **self.unrounded} if made_in == "float64" else values
        with errors_of(
            "torch",
            self.name,
            made_in,
            self.call,
            lambda: wrong_dtype_buffers(self.module, made_in),
        ):
            more = keeps, bool(at), moved, tape
            return run_torch(self.module, self.call, request, values, made_in, *more)
