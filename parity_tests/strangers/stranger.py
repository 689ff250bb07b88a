"""One stranger as data: its original, its port, its inputs and the rules between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn.parity import Report, Rule, compare


@dataclass(frozen=True)
class Stranger:
    """An original and its port.

    Attributes:
      theirs: builds the original; a class of another package is imported only here.
      port: the Flax class, built with `rngs` alone.
      inputs: the arguments of both calls by name.
      rules: what names do not say about the weights.
      torch_call, flax_call: how the two are called, where not with the inputs alone.
      dtypes: in which they are compared.
      options: further arguments of `compare`.
    """

    theirs: Callable[[], torch.nn.Module]
    port: Callable[..., nnx.Module]
    inputs: Callable[[], Mapping[str, Any]]
    rules: Callable[[], tuple[Rule, ...]] = tuple
    torch_call: Callable[..., Any] | None = None
    flax_call: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float64", "float32")
    options: Mapping[str, Any] = field(default_factory=dict)

    def compared(self, **options: Any) -> Report:
        """The comparison, of the outputs and all gradients, under jit."""
        given = {"dtypes": self.dtypes, "eager": False, **self.options, **options}
        return compare(
            self.theirs(),
            self.port(rngs=nnx.Rngs(0)),
            kwargs=self.inputs(),
            rules=self.rules(),
            torch_call=self.torch_call,
            flax_call=self.flax_call,
            **given,
        )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.RandomState(seed).standard_normal(shape)


def padded(lengths: list[int], longest: int) -> np.ndarray:
    """True at the real tokens, `B T`."""
    return np.arange(longest) < np.array(lengths)[:, None]


def causal(length: int) -> np.ndarray:
    """True where a query may attend, `T T`."""
    return np.tril(np.ones((length, length), bool))


def additive(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Zero where a query may look and the dtype's lowest number elsewhere."""
    return torch.zeros(seen.shape, dtype=like.dtype).masked_fill(~seen, torch.finfo(like.dtype).min)


def first(module: torch.nn.Module, **inputs: Any) -> Any:
    """The first of what torch returns."""
    return module(**inputs)[0]


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, bias: bool = True) -> nnx.Linear:
    """A Linear by torch's order of arguments."""
    return nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs)


def zeros(*shape: int) -> nnx.Param:
    """A parameter of this shape; `compare` fills it."""
    return nnx.Param(jnp.zeros(shape))


def normalised(x: jax.Array) -> jax.Array:
    """`x / |x|` over the last axis, as `torch.nn.functional.normalize` has it."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
