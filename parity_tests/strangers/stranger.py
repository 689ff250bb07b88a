"""What ports of strangers share: how they are compared, and small functions of torch and Flax."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn.parity import Rule

from ..port import Port


def stranger(
    theirs: Callable[[], torch.nn.Module],
    mine: Callable[..., nnx.Module],
    inputs: Callable[[], Mapping[str, Any]],
    rules: Callable[[], tuple[Rule, ...]] = tuple,
    torch_call: Callable[..., Any] | None = None,
    flax_call: Callable[..., Any] | None = None,
    **options: Any,
) -> Port:
    """The port of an original, compared in two dtypes under jit; `options` are of `compare`."""
    made = {"dtypes": ("float64", "float32"), "jit": True, "eager": False, **options}
    made |= {"torch_call": torch_call, "flax_call": flax_call}
    return Port(theirs.__name__, theirs, mine, lambda seed: inputs(), rules(), made)


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
