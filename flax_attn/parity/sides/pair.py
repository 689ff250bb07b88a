"""A pair of modules with everything that is fixed about their comparison; runs either side."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.known_layers import flax_path
from ...weights.plan import Plan
from ...weights.rule import Rule
from .flax import Flax, Force, unique_params
from .match import Match, agreed
from .run import Request, Run, rounded
from .torch import run_torch, stiff
from .torch_noise import RUNS as NOISY
from .torch_noise import Moved


class Names:
    """Torch's names of taps, gradients and statistics, told in Flax's."""

    def __init__(self, plan: Plan | None, module: nnx.Module, rules: Sequence[Rule]):
        self.plan, self.module = plan, module
        self.rules = [r for r in rules if r.kind == "move" and r.layout is None]

    def tap(self, name: str) -> str:
        """Where Flax has what torch calls `name`, counts of repeated calls left as they are."""
        base, mark, count = name.partition("#")
        for rule in self.rules:
            for (torch_name, *_), (flax_name, *_) in rule.groups([base]):
                if torch_name == base:
                    return flax_name + mark + count
        return flax_path(self.module, base) + mark + count

    def gradients(self, gradients: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Torch's gradients of inputs and of all that is carried, laid out as Flax has them."""
        inputs = {k: v for k, v in gradients.items() if k.startswith("input ")}
        trained = unique_params(self.module)
        return inputs | {k: v for k, v in self.carried(gradients).items() if k in trained}

    def carried(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of torch's arrays that the plan carries, laid out as Flax has them."""
        if self.plan is None:
            return {}
        moves = [m for m in self.plan.moves if all(name in arrays for name in m.sources)]
        laid = {k: v for move in moves for k, v in move.forward(dict(arrays)).items()}
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


# Of how many places of a dropout mask the kept share is told, and torch's names of dtypes.
PLACES = 4096
NAMES = {
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("bfloat", "float") for bits in (16, 32, 64)},
    **{"double": "float64", "float": "float32", "half": "float16"},
}


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
        with self._errors_of("Flax", side.dtype):
            return side.run(weights)

    def torch(
        self,
        dtype: str,
        values: dict[str, np.ndarray],
        keeps: Sequence[np.ndarray],
        at: str = "",
        moved: Moved | None = None,
    ) -> Run:
        """One run of torch in `dtype`, or in `at` with all numbers rounded to `dtype` before."""
        with self._errors_of("torch", at or dtype):
            call, request = self.calls[0], self.asked(dtype)
            return run_torch(
                self.torch_module, call, request, values, at or dtype, keeps, bool(at), moved
            )

    def noisy(self, dtype: str, keeps: Sequence[np.ndarray]) -> list[Run]:
        """Torch in `dtype` again, a few times, with every operation moved by its rounding."""
        values, quiet = self.narrow(dtype), Moved(None)
        self.torch(dtype, values, keeps, moved=quiet)
        moves = (Moved(seed, quiet.decided) for seed in range(NOISY))
        return [self.torch(dtype, values, keeps, moved=moved) for moved in moves]

    @contextmanager
    def _errors_of(self, side: str, dtype: str) -> Iterator[None]:
        """An exception of a module, told as what it is: its own, in this dtype."""
        module = self.torch_module if side == "torch" else self.flax_module
        try:
            yield
        except ParityError:
            raise
        except Exception as error:
            first = str(error).strip().split("\n")[0].rstrip(".")
            is_plain = self.calls[0 if side == "torch" else 1] is plain_call
            raise ParityError(
                f"{type(module).__name__} of {side} fails in {dtype}: {type(error).__name__}: "
                f"{first}. {_advice(side, module, dtype, first, is_plain)}"
            ) from error

    def run(self, dtype: str, modes: Sequence[str]) -> Iterator[tuple[str, tuple[Run, Run, Run]]]:
        """Flax in each of `modes`, torch in `dtype`, and torch in float64, which is the truth.

        Narrow dtypes run in the last mode alone, under jit, which is how they are used: each eager
        operation is compiled by itself, and float64 shows that both ways are the same function.
        Each run is given out before the next is made, so that a large model's need not lie beside
        one another.
        """
        values = self.narrow(dtype)
        weights = self.weights(values)
        torchs: tuple[Run, Run] | None = None
        modes = modes if dtype == "float64" else modes[-1:]
        for mode in modes:
            got = [self._flax_run(dtype, mode, weights, redraws=mode == modes[-1])]
            torchs = torchs or self._torch_runs(dtype, values, got[0].keeps)
            yield mode, (got.pop(), *torchs)  # it is held here no longer

    def _flax_run(
        self, dtype: str, mode: str, weights: dict[str, np.ndarray], redraws: bool
    ) -> Run:
        """One run of Flax, and its dropout masks drawn again."""
        side = self.flax(dtype, mode)
        got = self.run_flax(side, weights)
        if redraws and got.keeps and self.request.train:
            with self._errors_of("Flax", dtype):
                got.redrawn = side.again(_times(got.keeps, mode))
        return got

    def _torch_runs(
        self, dtype: str, values: dict[str, np.ndarray], keeps: Sequence[np.ndarray]
    ) -> tuple[Run, Run]:
        """Torch in a dtype, and in float64 with all numbers rounded to it before."""
        torchs = self.torch(dtype, values, keeps)
        narrow = dtype != "float64"
        return torchs, self.torch(dtype, values, keeps, "float64") if narrow else torchs


def plain_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """How a module is called unless somebody says otherwise."""
    return module(*args, **kwargs)


def _times(keeps: Sequence[np.ndarray], mode: str) -> int:
    """How often masks are drawn again, so that the share they keep tells: small ones often."""
    least = min((keep.size for keep in keeps if keep.size), default=PLACES)
    return max(1, min(-(-PLACES // least) - 1, 48 if mode == "jit" else 3))


def _advice(side: str, module: Any, dtype: str, first: str, is_plain: bool) -> str:
    """What to do about an exception, by what it says."""
    call = f"{side.lower()}_call="
    if "not implemented for" in first:
        return f"Torch has no such operation in {dtype} here: leave it out of dtypes."
    named = {NAMES[word] for word in re.findall("|".join(NAMES), first.lower())}
    if len(named) > 1 and dtype in named:
        constants = stiff(module, dtype) if side == "torch" else []
        what = f"{', '.join(constants[:3])} of it" if constants else "its constants"
        advice = f"Make {what} follow the dtype of its input"
    else:
        advice = "Call it with these inputs by itself"
    return f"{advice}, or pass {call}." if is_plain else f"{advice}, or change {call}."
