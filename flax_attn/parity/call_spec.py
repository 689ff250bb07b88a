"""What `compare` and `record` are asked of one call, before torch's side fills in what is open."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from .sides.calls import plain_call
from .sides.leaves import leaves
from .sides.live import Live
from .sides.run import Request, checked_constants

Value = TypeVar("Value")


@dataclass(frozen=True)
class CallSpec:
    """A call, and what is wanted of it; None is left to torch's side.

    Attributes:
      inputs, kwargs: the call's arguments.
      constants: names of inputs that are not differentiated.
      seed: of weights, cotangents and dropout masks that torch draws.
      train: whether both are in train mode.
      grads, taps: whether gradients and taps are wanted.
      call: how torch's module is called; None calls the module itself.

    Raises:
      TypeError: for inputs that are arrays of JAX or torch.
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
            if isinstance(x, jax.Array) or is_tensor(x):
                library = type(x).__module__.split(".")[0]
                raise TypeError(
                    f"Inputs are numpy arrays, so that both sides get the same; got a "
                    f"{library} array for {name}: numpy.asarray(...) is one."
                )

    def request(self) -> Request:
        """All of it, where nothing is left open."""
        wanted = self.seed or 0, bool(self.train), self.grads, self.taps
        return checked_constants(self.constants, Request(self.inputs, dict(self.kwargs), *wanted))

    def live(self, module: Any) -> Live:
        """Torch's side, of a module of torch's."""
        return Live(module, self.call or plain_call, self.request())


def or_default(value: Value | None, default: Value) -> Value:
    """What was said, if anything was."""
    return default if value is None else value


def is_torch_module(value: Any) -> bool:
    """Whether something is a module of torch's; nothing is where nobody has imported torch."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module)


def is_tensor(value: Any) -> bool:
    """Whether something is a tensor of torch's; nothing is where nobody has imported torch."""
    return "torch" in sys.modules and sys.modules["torch"].is_tensor(value)


def _named_leaves(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every argument, and of plain containers their leaves."""
    named = {**{f"input {i}": x for i, x in enumerate(inputs)}, **kwargs}
    containers = (list, tuple, dict)
    return [
        leaf
        for name, value in named.items()
        for leaf in (leaves(value, name) if isinstance(value, containers) else [(name, value)])
    ]
