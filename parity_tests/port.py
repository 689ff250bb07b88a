"""A module that somebody else wrote and the port of it: what every trial here compares."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from flax_attn.parity import Report, Rule, compare

QUICK = {"dtypes": ("float64",), "jit": False}


@dataclass(frozen=True)
class Port:
    """An original, its port, and how both are called.

    Attributes:
      name: of the original.
      theirs: makes the original, torch's module or a JAX function; imports what it needs only then.
      mine: makes the port; called as `mine(rngs=rngs)`.
      inputs: of both calls for a seed, by place or by name.
      rules: what names do not say about the weights.
      options: of `compare`, in place of `QUICK` and of `compare`'s own.
    """

    name: str
    theirs: Callable[[], Any]
    mine: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...] | Mapping[str, Any]]
    rules: tuple[Rule, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def report(self, seed: int = 0, **options: Any) -> Report:
        """The comparison, with weights and inputs of a seed."""
        if "torch" in sys.modules:  # for originals that draw what is no weight
            sys.modules["torch"].manual_seed(0)
        theirs, mine, given = self.theirs(), self.mine(rngs=nnx.Rngs(0)), self.inputs(seed)
        options = {**QUICK, "seed": seed, **self.options, **options}
        if self.rules:
            options["rules"] = self.rules
        if isinstance(given, Mapping):
            given, options["kwargs"] = (), given
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return compare(theirs, mine, *given, **options)


def always(*inputs: Any, **named: Any) -> Callable[[int], Any]:
    """The same inputs for every seed, by place or by name."""
    return lambda seed: named or inputs
