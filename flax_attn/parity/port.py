"""`port` copies weights between torch and Flax; `plan` shows the mapping; `suggest` finds rules."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from ..errors import ParityError
from ..weights.dtypes import holds
from ..weights.known_layers import flax_state, flax_values
from ..weights.mapping import Draft
from ..weights.plan import Plan, make_plan
from ..weights.rule import Rule
from ..weights.suggest import propose
from .call_spec import CallSpec
from .recording.recording import Recording, original_of
from .torch_module import read, write

M = TypeVar("M")


def plan(torch_module: Any, flax_module: nnx.Module, rules: Sequence[Rule] = ()) -> Plan:
    """The mapping that `port` would use, for printing: `print(plan(torch_module, flax_module))`.

    Args:
      torch_module, flax_module: the two modules; neither is changed. A `Recording` may replace the
        torch module.
      rules: the part of the mapping that does not follow from names and types.

    Raises:
      ParityError: listing every problem, if the modules do not match.

    >>> import torch
    >>> print(plan(torch.nn.Linear(3, 2), nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
    weight -> kernel  o i -> i o
    bias -> bias
    """
    original = original_of(torch_module, CallSpec())
    return make_plan(original.sources, flax_module, rules, [*original.parts])


def suggest(torch_module: Any, flax_module: nnx.Module, rules: Sequence[Rule] = ()) -> list[Rule]:
    """Proposed rules for unmapped torch tensors and unfilled Flax Params.

    Compares names, looks for compatible layouts, and checks that each rule solves a problem. No
    rule is applied. The list is empty if no tensor is left over, or if no rule fits. Two rules with
    the same names are the two possible orders of the parts of a fused weight, `[3, heads, width]`
    and `[heads, 3, width]`: keep one of them.

    Args:
      torch_module, flax_module: as for `port`.
      rules: rules that are already known.

    Raises:
      ParityError: if a rule of `rules` does not fit.

    >>> import torch
    >>> class Mine(nnx.Module):
    ...     def __init__(self):
    ...         self.proj = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    >>> theirs = torch.nn.Sequential()
    >>> theirs.project = torch.nn.Linear(3, 2)
    >>> print(*suggest(theirs, Mine()))
    Rule("project -> proj")
    """
    return propose(Draft(original_of(torch_module, CallSpec()).sources, flax_module, rules))


def port(source: Any, destination: M, rules: Sequence[Rule] = ()) -> M:
    """Copies every weight of a torch module into an nnx module, or from nnx to torch.

    Linear weights are transposed, and tensors are matched by type and name. Every torch tensor is
    used once, every Flax Param is filled once, and no memory is shared. If any tensor does not fit,
    no weight changes.

    Args:
      source: `torch.nn.Module`, a `Recording` of one, or `flax.nnx.Module`; not changed.
      destination: a module of the other library; its weights are replaced.
      rules: what does not follow from names and types, always written from torch to Flax.

    Returns:
      `destination`.

    Raises:
      ParityError: listing every problem; also if a value would lose precision in the destination's
        dtype (float64 into float32).
      TypeError: unless one module is torch's and the other is an nnx module.

    >>> import torch
    >>> theirs = torch.nn.Linear(3, 2)
    >>> mine = port(theirs, nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> bool((mine.kernel[...] == theirs.weight.detach().numpy().T).all())
    True
    """
    if isinstance(source, Mapping):
        raise TypeError(
            "port copies from a module; a state_dict, a mapping of arrays by name, is loaded by "
            "flax_attn.weights.load(layer, arrays, rules=rules), its tensors as numpy arrays."
        )
    if isinstance(destination, Recording):
        raise TypeError(f"port fills no Recording; got {destination.path} as its destination.")
    if isinstance(source, nnx.Module) and not isinstance(destination, nnx.Module):
        mapping = plan(destination, source, rules)
        values = mapping.back(flax_values(source))
        _check_dtypes(values, read(destination))
        write(destination, values)
    elif isinstance(destination, nnx.Module) and not isinstance(source, nnx.Module):
        mapping = plan(source, destination, rules)
        stored = source.values if isinstance(source, Recording) else read(source)
        values = mapping.forward(stored)
        _check_dtypes(values, flax_values(destination))
        set_flax(destination, values)
    else:
        kinds = f"{type(source).__name__} and {type(destination).__name__}"
        raise TypeError(f"port needs one torch.nn.Module and one flax.nnx.Module; got {kinds}.")
    return destination


def set_flax(module: nnx.Module, values: dict[str, np.ndarray], dtype: Any = None) -> None:
    """Copies arrays into an nnx module's Params and statistics, in their dtypes or in `dtype`."""
    state = flax_state(module)
    for path, value in values.items():
        kind = state[path].get_value().dtype if dtype is None else dtype
        kind = np.result_type(kind, np.complex64) if value.dtype.kind == "c" and dtype else kind
        with jax.enable_x64(True):  # otherwise float64 is silently truncated to float32
            array = jax.device_put(np.array(value, dtype=kind, order="C", copy=True))
        state[path].set_value(array)


def _check_dtypes(values: dict[str, np.ndarray], targets: dict[str, np.ndarray]) -> None:
    lost = [
        f"{name}: {value.dtype} into {targets[name].dtype}"
        for name, value in values.items()
        if not holds(targets[name].dtype, value.dtype)
    ]
    if lost:
        raise ParityError(
            "Weights would be rounded; give both sides one dtype "
            f"(torch_module.float(), param_dtype=...): {'; '.join(lost)}."
        )
