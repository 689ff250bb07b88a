"""Which objects can be sides of a comparison, and which arguments they take."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from .call_spec import is_torch, is_torch_module
from .recording.recording import Recording
from .sides.leaves import rebuilt
from .sides.recorder import is_array

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def check_sides(first: Any, second: Any) -> None:
    """Checks that both can run.

    Raises:
      TypeError: if the first is no torch module, JAX side or recording, or the second no JAX side.
    """
    known = isinstance(first, Recording) or is_torch_module(first) or _is_jax(first)
    if known and _is_jax(second):
        return
    kinds = f"{_type_name(first)} and {_type_name(second)}"
    swapped = isinstance(first, nnx.Module) and is_torch_module(second)
    hint = " The torch module comes first: swap them." if swapped else ""
    if any(isinstance(x, type) for x in (first, second)):
        hint = " Build it first."
    raise TypeError(
        "compare takes a torch.nn.Module or a Recording of one, a flax.nnx.Module or a JAX "
        "function as the original, one of the last two as the other, and numpy inputs; got "
        f"{kinds}.{hint}"
    )


def check_recorded(side: Any) -> None:
    """Checks that a side can be recorded.

    Raises:
      TypeError: if it is no torch module and no JAX side.
    """
    if not (is_torch_module(side) or _is_jax(side)):
        raise TypeError(
            f"record takes a torch.nn.Module, an nnx module or a JAX function; got "
            f"{_type_name(side)}."
        )


def arguments(first: Any, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Arguments:
    """The call's arguments; beside a JAX side, JAX arrays among them become numpy arrays."""
    is_recorded_torch = isinstance(first, Recording) and first.library == "torch"
    if is_recorded_torch or is_torch_module(first):
        return inputs, kwargs or {}

    def as_numpy(_: str, leaf: Any) -> Any:
        return np.asarray(leaf) if is_array(leaf) else leaf  # random keys stay

    return rebuilt(inputs, as_numpy, ""), rebuilt(dict(kwargs or {}), as_numpy, "")


def _is_jax(side: Any) -> bool:
    return callable(side) and not isinstance(side, type) and not is_torch(side)


def _type_name(side: Any) -> str:
    return f"the class {side.__name__}" if isinstance(side, type) else type(side).__name__
