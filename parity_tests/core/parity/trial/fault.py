"""A fault in a port's source, as a class that runs, and how far it moves outputs and gradients."""

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn.parity import draw
from flax_attn.parity.sides.flax import Flax
from flax_attn.parity.sides.run import Request, Run
from flax_attn.weights.known_layers import get_path
from flax_attn.weights.plan import first_paths

from .mutations import Mutation, mutations

# A fault counts if an output or a gradient moves by more than this, in float64.
COUNTS = 1e-6


@dataclass(frozen=True)
class Subject:
    """A block with its right port, whose source the faults are made in.

    Attributes:
      name: of the block.
      theirs: makes torch's module.
      port: the right port, a class of a module of blocks.
      inputs: draws the inputs for a seed.
      rules, options: of `compare`.
    """

    name: str
    theirs: Callable[[], Any]
    port: type[nnx.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    rules: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def source(self) -> str:
        return inspect.getsource(sys.modules[self.port.__module__])

    def faults(self) -> list["Fault"]:
        """Every fault in the port's classes and functions."""
        names = _reached(self.source, self.port.__name__)
        return [Fault(self, mutation) for mutation in mutations(self.source, names)]

    def run(self, port: type[nnx.Module], seed: int = 0) -> Run:
        """The outputs, gradients and taps of a port with weights and inputs of a seed."""
        options = self.options
        call = options.get("flax_call") or (lambda module, *args: module(*args))
        train = options.get("train", False)
        constants = frozenset(options.get("constants", ()))
        request = Request(self.inputs(seed), {}, seed, train, True, True, constants)
        with jax.numpy_rank_promotion("allow"):
            module = port(rngs=nnx.Rngs(0))
            shapes = {path: get_path(module, path)[...].shape for path in first_paths(module)}
            weights = {k: 0.6 * draw.normal(seed, k, s) for k, s in shapes.items()}
            return Flax(module, call, request, "float64", False).run(weights)


def _reached(source: str, name: str) -> frozenset[str]:
    """The names at the top of a module that a class uses, directly or not."""
    tops = {x.name: x for x in ast.parse(source).body if hasattr(x, "name")}
    reached, left = set(), [name]
    while left:
        one = left.pop()
        if one in tops and one not in reached:
            reached.add(one)
            left += [x.id for x in ast.walk(tops[one]) if isinstance(x, ast.Name)]
    return frozenset(reached)


@dataclass(frozen=True)
class Fault:
    """One fault in a block's port."""

    subject: Subject
    mutation: Mutation

    def __str__(self) -> str:
        return f"{self.subject.name}: {self.mutation}"

    @property
    def kind(self) -> str:
        return self.mutation.kind

    @cached_property
    def port(self) -> type[nnx.Module]:
        """The wrong port: its module run with the fault."""
        right = sys.modules[self.subject.port.__module__]
        module = ModuleType(right.__name__)
        module.__package__, module.__file__ = right.__package__, right.__file__
        exec(compile(self.mutation.source, right.__file__ or "", "exec"), module.__dict__)
        return getattr(module, self.subject.port.__name__)

    def runs(self, right: Run) -> Run | None:
        """The wrong port's run if it counts: it runs, has all outputs, and moves something."""
        try:
            with np.errstate(all="ignore"):
                wrong = self.subject.run(self.port)
        except Exception:  # a fault that does not run is none
            return None
        return wrong if moves(wrong, right) else None


def moves(wrong: Run, right: Run) -> bool:
    """Whether outputs or gradients of the same shapes differ, and all are finite."""
    pairs = [
        (one[name], other.get(name))
        for one, other in ((right.outputs, wrong.outputs), (right.gradients, wrong.gradients))
        for name in one
    ]
    same = right.outputs.keys() == wrong.outputs.keys()
    same = same and right.gradients.keys() == wrong.gradients.keys()
    if not same or any(y is None or x.shape != y.shape or x.dtype != y.dtype for x, y in pairs):
        return False
    if not all(np.isfinite(y).all() for x, y in pairs if np.isfinite(x).all()):
        return False
    return any(differ(x, y) for x, y in pairs)


def differ(x: np.ndarray, y: np.ndarray, limit: float = COUNTS) -> bool:
    """Whether two arrays differ by more than a limit, measured by the first's norm."""
    if x.shape != y.shape or x.dtype.kind not in "fc":
        return x.shape != y.shape or not np.array_equal(x, y)
    finite = np.isfinite(x) & np.isfinite(y)
    gap = np.linalg.norm(np.where(finite, x - y, 0.0))
    return bool((np.isfinite(x) != np.isfinite(y)).any() or gap > limit * np.linalg.norm(x))
