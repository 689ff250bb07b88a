"""A published block with its right port, and one mistake that a porter made in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Report, Rule, compare, draw

torch = pytest.importorskip("torch", reason="the harness compares with torch")

Rules = tuple[Rule, ...]


@dataclass(frozen=True)
class Block:
    """A class that somebody published, and a port of it that is right.

    Attributes:
      name: of the class.
      theirs: makes it; imports what it needs only then.
      port: makes the port, called as `port(rngs=rngs)`.
      inputs: of both calls.
      rules: of `compare`.
      options: of `compare`.
    """

    name: str
    theirs: Callable[[], Any]
    port: Callable[..., nnx.Module]
    inputs: tuple[Any, ...]
    rules: Rules = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def report(
        self, port: Callable[..., nnx.Module] | None = None, rules: Rules | None = None
    ) -> Report:
        """The comparison with the right port, or another one, in float64."""
        torch.manual_seed(0)
        theirs, mine = self.theirs(), (port or self.port)(rngs=nnx.Rngs(0))
        rules = self.rules if rules is None else rules
        quick = {"dtypes": ("float64",), "eager": False, "rules": rules}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return compare(theirs, mine, *self.inputs, **{**quick, **self.options})


@dataclass(frozen=True)
class Mistake:
    """One mistake in the port of a block: all else is as in the right port.

    Attributes:
      name: what is wrong, in plain words.
      block: whose port it is.
      place: the taps that are right to blame, "|" between them: "a" or "between a and b", an
        output, a gradient, a statistic.
      hint: words of which a right hint holds one, "|" between them; "" if no short name exists.
      port: makes the wrong port; None if only the rules are wrong.
      rules: of the wrong port where they are others.
      also: further places that are at fault.
    """

    name: str
    block: Block
    place: str
    hint: str = ""
    port: Callable[..., nnx.Module] | None = None
    rules: Rules | None = None
    also: str = ""

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def group(self) -> str:
        """The block's name."""
        return self.block.name

    @property
    def places(self) -> list[str]:
        """The names that are right."""
        return self.place.split("|")

    @property
    def guilty(self) -> list[str]:
        """All names that may be blamed, the right one first."""
        return [*self.places, *(name for name in self.also.split("|") if name)]

    @property
    def words(self) -> list[str]:
        """The words of which one must be said."""
        return [word for word in self.hint.split("|") if word]

    def report(self) -> Report:
        """The comparison with the wrong port."""
        return self.block.report(self.port, self.rules)


def channels_last(module: Any, x: Any) -> Any:
    """Torch's call for images as Flax has them: channels last in, channels last out."""
    return module(x.movedim(-1, 1)).movedim(1, -1)


def normal(name: str, *shape: int) -> np.ndarray:
    return draw.normal(0, f"ported/{name}", shape)
