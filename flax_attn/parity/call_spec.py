"""Arguments of one `compare` or `record` call, before defaults are filled in from torch's side."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from .sides.calls import as_side, plain_call
from .sides.flax.recorder import is_key
from .sides.jax.original import JaxOriginal
from .sides.leaves import leaves
from .sides.run import RunRequest, checked_constants
from .sides.torch.live import Live

Value = TypeVar("Value")


@dataclass(frozen=True)
class CallSpec:
    """A call and what to record of it; fields that are None take the value of torch's side.

    Attributes:
      inputs, kwargs: the call's arguments.
      constants: names of inputs that are not differentiated.
      seed: for weights, cotangents and the dropout masks that torch draws.
      train: whether both modules run in train mode.
      grads, taps: whether gradients and taps are recorded.
      call: calls the torch module, as `call(module, ...)`; None calls the module itself.

    Raises:
      TypeError: if an input is a jax or torch array; `arguments` converts those of jax.
    """

    inputs: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    constants: Sequence[str] = ()
    seed: int | None = None
    train: bool | None = None
    grads: bool = True
    taps: bool = True
    call: Callable[..., Any] | None = None

    def __post_init__(self):
        for name, x in _named_leaves(self.inputs, self.kwargs):
            if (isinstance(x, jax.Array) and not is_key(x)) or is_tensor(x):
                library = type(x).__module__.split(".")[0]
                raise TypeError(
                    f"Inputs are numpy arrays, so that both sides get the same; got a "
                    f"{library} array for {name}: numpy.asarray(...) is one."
                )

    def request(self) -> RunRequest:
        """Returns the `RunRequest`, with defaults for open fields."""
        wanted = self.seed or 0, bool(self.train), self.grads, self.taps
        request = RunRequest(self.inputs, dict(self.kwargs), *wanted)
        return checked_constants(self.constants, request)

    def side(self, module: Any) -> Live | JaxOriginal:
        """Returns the first side for a torch module, an nnx module or a JAX function."""
        if is_torch_module(module):
            return self.live(module)
        return JaxOriginal(as_side(module), self.call or plain_call, self.request())

    def live(self, module: Any) -> Live:
        """Returns torch's side for a torch module."""
        return Live(module, self.call or plain_call, self.request())


def or_default(value: Value | None, default: Value) -> Value:
    """Returns `value` unless it is None, else `default`."""
    return default if value is None else value


def is_torch_module(value: Any) -> bool:
    """Whether `value` is a torch module; False if torch has not been imported."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module)


def is_torch(value: Any) -> bool:
    """Whether `value` is a torch module, or a function or class of torch."""
    home = getattr(value, "__module__", None) or type(value).__module__
    return is_torch_module(value) or home.partition(".")[0] == "torch"


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor; False if torch has not been imported."""
    return "torch" in sys.modules and sys.modules["torch"].is_tensor(value)


def _named_leaves(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns the arguments by name, with plain containers flattened into their leaves."""
    named = {**{f"input {i}": x for i, x in enumerate(inputs)}, **kwargs}
    containers = (list, tuple, dict)
    return [
        leaf
        for name, value in named.items()
        for leaf in (leaves(value, name) if isinstance(value, containers) else [(name, value)])
    ]
