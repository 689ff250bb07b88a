"""Which objects can be sides of a comparison, and which arguments they take."""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from .call_spec import is_torch, is_torch_module
from .recording.recording import Recording
from .sides.flax.recorder import is_array
from .sides.leaves import rebuilt
from .sides.libraries import libraries
from .torch_module import as_torch_module

LINEN = (
    "a flax.linen module, and compare takes flax.nnx: wrap it, "
    "flax.nnx.bridge.ToNNX(module, rngs=flax.nnx.Rngs(0)).lazy_init(*inputs)."
)
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def check_sides(first: Any, second: Any) -> Any:
    """Checks that both can run; returns the first, a torch function as a module.

    Raises:
      TypeError: if the first is no torch module, JAX side or recording, or the second no JAX side.
    """
    first = _as_original(first)
    known = isinstance(first, Recording) or is_torch_module(first) or _is_jax(first)
    for side in (first, second):
        if "flax.linen" in sys.modules and isinstance(side, sys.modules["flax.linen"].Module):
            raise TypeError(f"{_type_name(side)} is {LINEN}")
    if known and _is_jax(second):
        return first
    kinds = f"{_type_name(first)} and {_type_name(second)}"
    swapped = isinstance(first, nnx.Module) and is_torch_module(second)
    hint = " The torch module comes first: swap them." if swapped else ""
    if any(isinstance(x, type) for x in (first, second)):
        hint = " Build it first."
    raise TypeError(
        "compare takes a torch.nn.Module or a Recording of one, a flax.nnx.Module or a function of "
        "torch or JAX as the original, a flax.nnx.Module or a JAX function as the other, and "
        f"arrays of numpy or JAX; got {kinds}.{hint}"
    )


def check_recorded(side: Any) -> Any:
    """Checks that a side can be recorded; returns it, a torch function as a module.

    Raises:
      TypeError: if it is no torch module and no JAX side.
    """
    side = _as_original(side)
    if not (is_torch_module(side) or _is_jax(side)):
        raise TypeError(
            f"record takes a torch.nn.Module, an nnx module or a function of torch or JAX; got "
            f"{_type_name(side)}."
        )
    return side


def arguments(inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Arguments:
    """The call's arguments, JAX arrays among them as numpy arrays, which both sides take."""

    def as_numpy(_: str, leaf: Any) -> Any:
        return np.asarray(leaf) if is_array(leaf) else leaf  # random keys stay

    return rebuilt(inputs, as_numpy, ""), rebuilt(dict(kwargs or {}), as_numpy, "")


def _as_original(side: Any) -> Any:
    is_known = not callable(side) or isinstance(side, type | nnx.Module) or is_torch_module(side)
    return side if is_known or libraries(side) != {"torch"} else as_torch_module(side)


def _is_jax(side: Any) -> bool:
    return callable(side) and not isinstance(side, type) and not is_torch(side)


def _type_name(side: Any) -> str:
    return f"the class {side.__name__}" if isinstance(side, type) else type(side).__name__
