"""A small pair to compare: named parts on both sides, two forwards, and how much of a fault."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Report, compare, draw

torch = pytest.importorskip("torch", reason="the harness compares with torch")

RIGHT, LOW, FULL = 0.0, 1e-4, 1.0
B, T, S, N, H, D = 2, 5, 7, 3, 4, 10  # no two agree, and N H is not D


@dataclass(frozen=True)
class Share:
    """How much of a fault is planted: nothing, a 1e-4 of it, or all."""

    size: float

    def __bool__(self) -> bool:
        return self.size > 0

    def __call__(self, right: Any, wrong: Any) -> Any:
        """`right`, so much of the way to `wrong`; what is not floating is wrong at once."""
        if self.size in (RIGHT, FULL):
            return wrong if self.size else right
        right, wrong = jnp.asarray(right), jnp.asarray(wrong)
        if not jnp.issubdtype(right.dtype, jnp.inexact):
            return wrong
        both = jnp.isfinite(right) & jnp.isfinite(wrong)
        gap = jnp.where(both, wrong, 0) - jnp.where(both, right, 0)
        return jnp.where(both, right + self.size * gap, wrong).astype(right.dtype)

    def of(self, right: float, wrong: float) -> float:
        """The same of Python's numbers."""
        return right + self.size * (wrong - right)


@dataclass(frozen=True)
class Part:
    """How torch and Flax make one part of a module."""

    torch: Callable[[], Any]
    flax: Callable[[nnx.Rngs, Share], Any]


class Theirs(torch.nn.Module):
    """Torch's side: parts by name, and a forward that takes the module and the inputs."""

    def __init__(self, parts: Mapping[str, Part], run: Callable[..., Any]):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            made = part.torch()
            if torch.is_tensor(made) and not isinstance(made, torch.nn.Parameter):
                self.register_buffer(name, made)
            else:
                setattr(self, name, made)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


class Ours(nnx.Module):
    """Flax's side: the same, its forward told how much of the fault to plant."""

    def __init__(self, parts: Mapping[str, Part], run: Callable[..., Any], share: Share):
        self.run, self.share = run, share
        for name, part in parts.items():
            made = part.flax(nnx.Rngs(0), share)
            if made is not None:
                setattr(self, name, made)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, self.share, *inputs, **named)


@dataclass(frozen=True)
class Pair:
    """Two modules of the same parts.

    Attributes:
      parts: by name, the same on both sides.
      theirs: torch's forward, `theirs(module, *inputs)`.
      ours: Flax's, `ours(module, share, *inputs)`.
      inputs, kwargs: of the call.
      options: of `compare`.
      rules: of `compare`, given the share.
    """

    parts: Mapping[str, Part]
    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Callable[[Share], tuple] = lambda share: ()

    def report(self, size: float = RIGHT) -> Report:
        """The comparison, in float64 and eagerly unless the options say otherwise."""
        share = Share(size)
        torch.manual_seed(0)
        pair = Theirs(self.parts, self.theirs), Ours(self.parts, self.ours, share)
        quick = {"dtypes": ("float64",), "jit": False, "kwargs": dict(self.kwargs)}
        options = {**quick, "rules": self.rules(share), **self.options}
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return compare(*pair, *self.inputs, **options)


def linear(inward: int, outward: int, bias: bool = True) -> Part:
    return Part(
        lambda: torch.nn.Linear(inward, outward, bias=bias),
        lambda rngs, share: nnx.Linear(
            inward, outward, use_bias=bias, kernel_init=jax.nn.initializers.zeros, rngs=rngs
        ),
    )


def embedding(count: int, width: int) -> Part:
    return Part(
        lambda: torch.nn.Embedding(count, width),
        lambda rngs, share: nnx.Embed(count, width, rngs=rngs),
    )


def parameter(*shape: int) -> Part:
    return Part(
        lambda: torch.nn.Parameter(torch.ones(shape)),
        lambda rngs, share: nnx.Param(jnp.ones(shape)),
    )


def projections(inward: int = D, n: int = N, k: int | None = None, h: int = H) -> dict[str, Part]:
    """Queries, keys, values and the output of an attention."""
    wide, narrow = n * h, (k or n) * h
    return {
        "q": linear(inward, wide),
        "k": linear(inward, narrow),
        "v": linear(inward, narrow),
        "o": linear(wide, inward),
    }


def normal(name: str, *shape: int) -> np.ndarray:
    return draw.normal(0, f"strange/{name}", shape)


def tokens(*shape: int, below: int, name: str = "ids") -> np.ndarray:
    return draw.stream(0, f"strange/{name}").randint(0, below, shape)
