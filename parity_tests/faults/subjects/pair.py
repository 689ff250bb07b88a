"""Small modules to compare: named parts on both sides, and two forwards."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Rule, draw

from ...port import Port

torch = pytest.importorskip("torch", reason="the harness compares with torch")

B, T, S, N, H, D = 2, 5, 7, 3, 4, 10  # no two agree, and N H is not D


@dataclass(frozen=True)
class Part:
    """How torch and Flax make one part of a module."""

    torch: Callable[[], Any]
    flax: Callable[[nnx.Rngs], Any]


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
    """Flax's side: the same."""

    def __init__(self, parts: Mapping[str, Part], run: Callable[..., Any], rngs: nnx.Rngs):
        self.run = run
        for name, part in parts.items():
            made = part.flax(rngs)
            if made is not None:
                setattr(self, name, made)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def pair(
    name: str,
    parts: Mapping[str, Part],
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
    rules: tuple[Rule, ...] = (),
) -> Port:
    """Two modules of the same parts, whose forwards are `theirs(m, *inputs)` and `ours(...)`."""
    pieces = partial(Theirs, parts, theirs), partial(Ours, parts, ours)
    return Port(name, *pieces, lambda seed: inputs, rules, options or {})


def linear(inward: int, outward: int, bias: bool = True) -> Part:
    return Part(
        lambda: torch.nn.Linear(inward, outward, bias=bias),
        lambda rngs: nnx.Linear(
            inward, outward, use_bias=bias, kernel_init=jax.nn.initializers.zeros, rngs=rngs
        ),
    )


def embedding(count: int, width: int) -> Part:
    return Part(
        lambda: torch.nn.Embedding(count, width),
        lambda rngs: nnx.Embed(count, width, rngs=rngs),
    )


def parameter(*shape: int) -> Part:
    return Part(
        lambda: torch.nn.Parameter(torch.ones(shape)),
        lambda rngs: nnx.Param(jnp.ones(shape)),
    )


def projections(
    inward: int = D, n: int = N, k: int | None = None, h: int = H, wide: int | None = None
) -> dict[str, Part]:
    """Queries, keys, values of width `wide` and the output of an attention."""
    few, wide = k or n, wide or h
    return {
        "q": linear(inward, n * h),
        "k": linear(inward, few * h),
        "v": linear(inward, few * wide),
        "o": linear(n * wide, inward),
    }


def normal(name: str, *shape: int) -> np.ndarray:
    return draw.normal(0, f"strange/{name}", shape)


def tokens(*shape: int, below: int, name: str = "ids") -> np.ndarray:
    return draw.stream(0, f"strange/{name}").randint(0, below, shape)
