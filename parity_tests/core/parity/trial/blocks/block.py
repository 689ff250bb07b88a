"""A published block in torch, its right port, and what a comparison of the two needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Report, Rule, compare, draw

torch = pytest.importorskip("torch", reason="the harness compares with torch")


@dataclass(frozen=True)
class Block:
    """A block that somebody published, and a port of it that is right.

    Attributes:
      name: of the block.
      theirs: makes the torch module.
      port: the class of the port, called as `port(rngs=rngs)`.
      inputs: of both calls, drawn for a seed.
      rules: of `compare`.
      options: of `compare`.
    """

    name: str
    theirs: Callable[[], "torch.nn.Module"]
    port: Callable[..., nnx.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    rules: tuple[Rule, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def report(self, port: Callable[..., nnx.Module] | None = None, seed: int = 0) -> Report:
        """The comparison with the right port, or another one, in float64 and eagerly."""
        torch.manual_seed(0)
        theirs, mine = self.theirs(), (port or self.port)(rngs=nnx.Rngs(0))
        options = {"dtypes": ("float64",), "jit": False, "rules": self.rules, **self.options}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return compare(theirs, mine, *self.inputs(seed), seed=seed, **options)


def normal(seed: int, name: str, *shape: int) -> np.ndarray:
    return draw.normal(seed, f"trial/{name}", shape)


def integers(seed: int, name: str, below: int, *shape: int) -> np.ndarray:
    return draw.stream(seed, f"trial/{name}").randint(0, below, shape)


def channels_last(module: Any, x: Any, *more: Any) -> Any:
    """Torch's call for images as Flax has them: channels last in, channels last out."""
    return module(x.movedim(-1, 1), *more).movedim(1, -1)
