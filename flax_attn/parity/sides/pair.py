"""A torch and a Flax module with the settings of their comparison; runs either side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...weights.known_layers import LAYERS, flax_path, get_path
from ...weights.plan import Plan, first_paths
from ...weights.rule import Rule
from ..side_names import SIDES, Sides
from ..watch import Watch
from .calls import Function, errors_of, name_of
from .flax.side import Flax, Force
from .jax.evaluate import Evaluation, lifted_in
from .mask_axes import MaskAxes, misplaced, outputs_agree
from .match import Match, agreed
from .original import Original
from .run import MaskMismatch, Run, RunRequest, narrowed


class Names:
    """Translates torch's names of taps, gradients and statistics to Flax's."""

    def __init__(self, plan: Plan | None, module: nnx.Module, rules: Sequence[Rule]):
        self.plan, self.module = plan, module
        self.rules = [r for r in rules if r.kind == "move" and r.layout is None]
        self.layers = _layers(plan, module)

    def tap(self, name: str) -> str:
        """Returns Flax's name for torch's tap `name`; the count of repeated calls is kept."""
        base, mark, count = name.partition("#")
        for rule in self.rules:
            for (torch_name, *_), (flax_name, *_) in rule.groups([base]):
                if torch_name == base:
                    return flax_name + mark + count
        return self.layers.get(base, flax_path(self.module, base)) + mark + count

    def gradients(self, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts gradients of inputs and mapped parameters to Flax's names and layouts."""
        inputs = {k: v for k, v in gradients.items() if k.startswith("input ")}
        trained = first_paths(self.module)
        return inputs | {k: v for k, v in self.carried(gradients).items() if k in trained}

    def carried(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts the torch arrays that the plan maps to Flax's names and layouts."""
        if self.plan is None:
            return {}
        moves = [m for m in self.plan.moves if all(name in arrays for name in m.sources)]
        laid_out = {k: v for move in moves for k, v in move.forward(dict(arrays)).items()}
        return canonical(laid_out, self.module)


def _layers(plan: Plan | None, module: nnx.Module) -> dict[str, str]:
    """Maps torch modules to known Flax layers that exchange tensors only with each other.

    Rules that name single tensors determine pairs of modules in this way.
    """
    to: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    for move in plan.moves if plan else ():
        for name in move.sources:
            for path in move.targets:
                one, other = name.rpartition(".")[0], path.rpartition(".")[0]
                to.setdefault(one, set()).add(other)
                back.setdefault(other, set()).add(one)
    pairs = ((one, *others) for one, others in to.items() if len(others) == 1)
    return {
        one: other
        for one, other in pairs
        if one and len(back[other]) == 1 and isinstance(get_path(module, other), LAYERS)
    }


def matches(
    got: Run, truth: Run, names: Names, nearest: bool = False
) -> Iterator[tuple[str, str, Match]]:
    """Yields (torch's name, Flax's name, match) for all common taps, in torch's call order.

    `nearest` takes the match with the smallest error if none is equal, as in narrow dtypes.
    """
    yield from agreed(got, truth, names.tap, nearest)


def canonical(values: Mapping[str, np.ndarray], module: nnx.Module) -> dict[str, np.ndarray]:
    """Renames `values` to the first path of each shared Param."""
    first = first_paths(module)
    return {first.get(path, path): value for path, value in values.items()}


# Minimum number of mask elements from which a dropout's keep rate is estimated.
PLACES = 4096


@dataclass(frozen=True)
class Pair:
    """Both sides of a comparison, and the mapping between their weights.

    Attributes:
      original: the torch side.
      flax_module: the Flax module, never modified.
      call: function that calls it.
      request: the call's arguments, and what to compute.
      plan: the mapping; None if each side keeps its own weights.
      names: translates torch's names to Flax's.
      watch: reports progress.
      sides: what the two sides are called.
      axes: axis orders of dropout masks, learned from the first runs.
    """

    original: Original
    flax_module: nnx.Module
    call: Callable[..., Any]
    request: RunRequest
    plan: Plan | None
    names: Names
    watch: Watch
    sides: Sides = SIDES
    axes: MaskAxes = field(default_factory=MaskAxes)

    @property
    def draws_alone(self) -> bool:
        """Whether each side draws from the keys that it has: a JAX function, or in eval mode."""
        sides = self.flax_module, getattr(self.original, "module", None)
        is_function = any(isinstance(side, Function) for side in sides)
        return self.original.library == "jax" and (is_function or not self.request.train)

    def narrow(self, dtype: str) -> dict[str, np.ndarray]:
        """Returns torch's weights rounded to `dtype`."""
        return narrowed(self.original.values, dtype)

    def weights(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts torch's weights to Flax's; empty without a plan."""
        return canonical(self.plan.forward(values), self.flax_module) if self.plan else {}

    def flax(self, dtype: str, mode: str, force: Mapping[str, Force] | None = None) -> Flax:
        """Returns the Flax side, ready to run."""
        request = self.request.in_dtype(dtype)
        keeps = self.original.keeps
        repeats = None if keeps is None else self.axes.to_flax(keeps)
        evaluation = Evaluation(lifted_in(dtype) if self.original.library == "jax" else ())
        run_options = dtype, mode == "jit", force, repeats, evaluation
        return Flax(self.flax_module, self.call, request, *run_options)

    def run_flax(self, side: Flax, weights: dict[str, np.ndarray]) -> Run:
        """Runs the Flax side with these weights by path; its errors become ParityErrors."""
        with self._errors(side.dtype):
            return side.run(weights)

    def layer_alone(
        self, path: str, x: np.ndarray, change: Callable[[Any], None] = lambda layer: None
    ) -> np.ndarray:
        """Runs one Flax layer in float64 with torch's weights, after `change` modified it."""
        side = self.flax("float64", "eager")
        with side.precise():
            layer: Any = get_path(side.copy(self.weights(self.narrow("float64"))), path)
            change(layer)
            return np.asarray(layer(jnp.asarray(x)))

    def _errors(self, dtype: str) -> AbstractContextManager[None]:
        side = "Flax" if self.original.library == "torch" else "the second side"
        return errors_of(side, name_of(self.flax_module), dtype, self.call)

    def run(self, dtype: str, modes: Sequence[str]) -> Iterator[tuple[str, tuple[Run, Run, Run]]]:
        """Yields Flax in each mode, torch in `dtype`, and torch in float64, the truth.

        Narrow dtypes run only in the last mode, under jit, as they are used: eager operations are
        compiled one by one, and float64 shows that both modes compute the same function. Runs are
        yielded one at a time, so that a large model's are not all in memory.
        """
        modes = modes if dtype == "float64" else modes[-1:]
        weights = self.weights(self.narrow(dtype))
        torch_runs: tuple[Run, Run] | None = None
        for mode in modes:
            self.watch.at(f"Flax in {dtype}, {'under jit' if mode == 'jit' else 'eagerly'}")
            got = [self._flax_run(dtype, mode, weights, redraw_masks=mode == modes[-1])]
            if torch_runs is None:
                self.watch.at(f"torch in {dtype}")
                torch_runs = self._torch_run(dtype, got[0])
                for _ in self.original.keeps or ():  # recorded masks, which Flax repeats
                    if not self.axes.learn(got[0], torch_runs[0]):
                        break
                    got = [self._flax_run(dtype, mode, weights, redraw_masks=mode == modes[-1])]
            self.watch.at(f"judging {dtype}")
            # Popped, so that the generator does not keep the run alive while it is suspended.
            yield mode, (got.pop(), *torch_runs)

    def _torch_run(self, dtype: str, got: Run) -> tuple[Run, Run]:
        """Runs torch with Flax's dropout masks, until their axes are in the right order."""
        runs = self._torch_once(dtype, got, self.axes)
        for _ in got.keeps if self.original.keeps is None else ():
            if not self.axes.learn(got, runs[0]):
                break
            runs = self._torch_once(dtype, got, self.axes)
        for axes in self.axes.guesses(got, runs[0]) if dtype == "float64" else ():
            other = self._torch_once(dtype, got, axes)
            if outputs_agree(got, other[0]):
                self.axes.orders.update(axes.orders)
                return other
        i = self.misplaced(got, runs[0])
        if i is not None and self.original.keeps is None:
            shapes = got.keeps[i].shape, runs[0].keeps[i].shape
            raise MaskMismatch(i + 1, *shapes, runs[0].places[i], got.places[i])
        return runs

    def misplaced(self, got: Run, torch_run: Run) -> int | None:
        """Number of the first mask that fits by its permuted axes alone; None if there is none."""
        return misplaced(got, torch_run, matches(got, torch_run, self.names))

    def _torch_once(self, dtype: str, got: Run, axes: MaskAxes) -> tuple[Run, Run]:
        """Runs torch with these masks; a mismatch error names the Flax submodule too."""
        try:
            return self.original.run(dtype, axes.to_torch(got.keeps))
        except MaskMismatch as error:
            number, shape, want, place = error.facts
            raise MaskMismatch(number, shape, want, place, got.places[number - 1]) from None

    def _flax_run(
        self, dtype: str, mode: str, weights: dict[str, np.ndarray], redraw_masks: bool
    ) -> Run:
        """Runs Flax once, and draws its dropout masks again if `redraw_masks`."""
        side = self.flax(dtype, mode)
        got = self.run_flax(side, weights)
        if self.draws_alone:
            got.forget_masks()
        if redraw_masks and got.keeps and self.request.train:
            with self._errors(dtype):
                got.redrawn = side.redraw_masks(_times(got.keeps, mode))
        return got


def _times(keeps: Sequence[np.ndarray], mode: str) -> int:
    """Number of redraws that gives the smallest mask about `PLACES` samples of its keep rate."""
    # The limit is low without jit, where each redraw runs the whole module eagerly.
    least = min((keep.size for keep in keeps if keep.size), default=PLACES)
    return max(1, min(-(-PLACES // least) - 1, 48 if mode == "jit" else 3))
