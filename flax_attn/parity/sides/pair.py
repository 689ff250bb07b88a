"""A pair of modules with everything that is fixed about their comparison; runs either side."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.rule import Rule
from ..mapping import Plan
from ..pairs import flax_path
from .flax import Flax, Force, unique_params
from .match import Match, agreed
from .run import Request, Run, rounded
from .torch import run_torch


class Names:
    """Torch's names of taps, gradients and statistics, told in Flax's."""

    def __init__(self, plan: Plan | None, module: nnx.Module, rules: Sequence[Rule]):
        self.plan, self.module = plan, module
        self.rules = [r for r in rules if r.kind == "move" and r.layout is None]

    def tap(self, name: str) -> str:
        """Where Flax has what torch calls `name`, counts of repeated calls left as they are."""
        base, mark, count = name.partition("#")
        for rule in self.rules:
            for (here, *_), (there, *_) in rule.groups([base]):
                if here == base:
                    return there + mark + count
        return flax_path(self.module, base) + mark + count

    def gradients(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Torch's gradients of inputs and of all that is carried, laid out as Flax has them."""
        inputs = {k: v for k, v in found.items() if k.startswith("input ")}
        return inputs | self.carried(found)

    def carried(self, found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of torch's arrays that the plan carries, laid out as Flax has them."""
        if self.plan is None:
            return {}
        moves = [m for m in self.plan.moves if all(name in found for name in m.sources)]
        laid = {k: v for move in moves for k, v in move.forward(dict(found)).items()}
        return canonical(laid, self.module)


def matches(
    got: Run, truth: Run, names: Names, nearest: bool = False
) -> Iterator[tuple[str, str, Match]]:
    """Every tap that both sides have, in torch's call order: torch's name, Flax's, and the pair.

    `nearest`: what is nearest is taken where nothing is equal, as in narrow dtypes.
    """
    yield from agreed(got, truth, names.tap, nearest)


def canonical(values: Mapping[str, np.ndarray], module: nnx.Module) -> dict[str, np.ndarray]:
    """`values` by the first path of each Param, where one is shared."""
    first = unique_params(module)
    return {first.get(path, path): value for path, value in values.items()}


@dataclass(frozen=True)
class Pair:
    """Two modules, how they are called, and how the weights of one become those of the other.

    Attributes:
      torch_module, flax_module: neither is changed.
      calls: of torch and of Flax.
      request: the call's arguments, and what is wanted of it.
      plan: the mapping; None if each keeps its own weights.
      names: torch's names in Flax's.
      values: torch's weights.
      ties: torch's second names of tensors, and their first.
    """

    torch_module: Any
    flax_module: nnx.Module
    calls: tuple[Callable[..., Any], Callable[..., Any]]
    request: Request
    plan: Plan | None
    names: Names
    values: dict[str, np.ndarray]
    ties: dict[str, str] = field(default_factory=dict)

    def narrow(self, dtype: str) -> dict[str, np.ndarray]:
        """Torch's weights, rounded."""
        return {name: rounded(x, dtype) for name, x in self.values.items()}

    def weights(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Flax's weights from torch's."""
        return canonical(self.plan.forward(values), self.flax_module) if self.plan else {}

    def asked(self, dtype: str) -> Request:
        """The request with its inputs rounded."""
        inputs = {name: rounded(x, dtype) for name, x in self.request.arrays().items()}
        args, kwargs = self.request.fill(inputs)
        return replace(self.request, args=args, kwargs=kwargs)

    def flax(self, dtype: str, mode: str, force: Mapping[str, Force] | None = None) -> Flax:
        """Flax's side, ready to run."""
        return Flax(self.flax_module, self.calls[1], self.asked(dtype), dtype, mode == "jit", force)

    def run_flax(self, side: Flax, weights: dict[str, np.ndarray]) -> Run:
        """One run of Flax's side with its own weights, by path."""
        with _told("Flax", self.flax_module, side.dtype):
            return side.run(weights)

    def torch(
        self, dtype: str, values: dict[str, np.ndarray], keeps: Sequence[np.ndarray], at: str = ""
    ) -> Run:
        """One run of torch in `dtype`, or in `at` with all numbers rounded to `dtype` before."""
        with _told("torch", self.torch_module, at or dtype):
            request = self.asked(dtype)
            return run_torch(self.torch_module, self.calls[0], request, values, at or dtype, keeps)

    def run(self, dtype: str, modes: Sequence[str]) -> dict[str, tuple[Run, Run, Run]]:
        """Flax in each of `modes`, torch in `dtype`, and torch in float64, which is the truth.

        Narrow dtypes run in the last mode alone, under jit, which is how they are used: each eager
        operation is compiled by itself, and float64 shows that both ways are the same function.
        """
        values = self.narrow(dtype)
        modes = modes if dtype == "float64" else modes[-1:]
        weights = self.weights(values)
        got = {mode: self.run_flax(self.flax(dtype, mode), weights) for mode in modes}
        keeps = got[modes[0]].keeps
        own = self.torch(dtype, values, keeps)
        truth = own if dtype == "float64" else self.torch(dtype, values, keeps, "float64")
        return {mode: (run, own, truth) for mode, run in got.items()}


@contextmanager
def _told(side: str, module: Any, dtype: str):
    """An exception of a module, told as what it is: its own, in this dtype."""
    try:
        yield
    except ParityError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0].rstrip(".")
        advice = f"Call it with these inputs by itself, or pass {side.lower()}_call=."
        if re.search("dtype|float32|Float|[Dd]ouble", first):
            advice = (
                f"Make its constants follow the dtype of its input, or pass {side.lower()}_call=."
            )
        raise ParityError(
            f"{type(module).__name__} of {side} fails in {dtype}: {type(error).__name__}: "
            f"{first}. {advice}"
        ) from error
