"""Runs torch with one injected mistake: some operations return a different result."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .torch_dispatch import dispatch_mode

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Mistakes = Iterator[tuple[str, Change]]  # (description, replacement) pairs
Named = Callable[[Any], str]  # returns the name of a tensor, "" if it has none
# Functions that compute nothing, or that this package calls to record gradients.
IGNORED_FUNCTIONS = ("__get__", "__set__", "register_hook", "_set_grad_enabled", "requires_grad_")
# Functions of this package that may be on the call stack of an operation of the module.
GRADIENT_FUNCTIONS = (
    "__torch_dispatch__",
    "__torch_function__",
    "on_op",
    "_on_op",
    "in_float64",
    "noisy",
    "called",
)
# Operations that torch inserts only because a tensor is recorded elsewhere as well.
IGNORED_OPS = ("detach", "alias", "lift_fresh")
# File of torch's operation objects, whose frames are skipped when looking for the caller.
OPERATIONS = os.path.join("torch", "_ops.py")
PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(frozen=True)
class Operation:
    """One recorded operation of a run.

    Attributes:
      number: number of operations before it.
      site: submodule path, source line, operation, and argument shapes.
      path: path of the innermost running submodule.
      func, args, kwargs, out: of the call.
    """

    number: int
    site: tuple[Any, ...]
    path: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any

    @property
    def name(self) -> str:
        """Torch's name of the operation, without the underscore of in-place variants."""
        return self.func.overloadpacket.__name__.rstrip("_")


@dataclass
class Changes:
    """Replaces operations of a run by number, or records all operations if there are none.

    Attributes:
      by_number: replacement by operation number.
      noted: recorded operations; empty if any are replaced.
      count: number of operations so far.
      through: indices in `calls` of `detach` calls replaced by the identity.
      stops: indices in `calls` of calls whose result is detached.
      calls: function name and submodule path of every call of a torch function.
      names: names of parameters and buffers by the address of their storage.
    """

    by_number: Mapping[int, Change] = field(default_factory=dict)
    noted: list[Operation] = field(default_factory=list)
    count: int = 0
    through: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    calls: list[tuple[str, str]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def backward(self) -> bool:
        """Whether the changes affect gradients."""
        return bool(self.through or self.stops)

    def mode(self, module: Any, path: Callable[[], str]) -> Any:
        """Returns a dispatch mode that replaces or records the operations of a module.

        Args:
          path: returns the path of the running submodule.
        """
        tensors = (*module.named_parameters(), *module.named_buffers())
        # By storage address, so that views such as `weight.T` are recognised too.
        self.names = {x.untyped_storage().data_ptr(): name for name, x in tensors}

        def on_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            place = None if func.overloadpacket.__name__ in IGNORED_OPS else _caller()
            if place is None:
                return func(*args, **kwargs)
            number, self.count = self.count, self.count + 1
            change = self.by_number.get(number)
            if change is not None:
                return _changed(func, args, kwargs, change)
            if self.by_number:
                return func(*args, **kwargs)
            # An in-place operation overwrites an argument that is looked at after the run.
            copied = tuple(map(_copied, args)) if func._schema.is_mutable else args
            out = func(*args, **kwargs)
            site = (path(), *place, func, _shapes(args))
            shown = _closed(func, copied)
            self.noted.append(Operation(number, site, path(), func, shown, kwargs, out))
            return out

        return dispatch_mode(on_op)

    def functions(self, path: Callable[[], str]) -> Any:
        """Returns a function mode that counts torch calls and passes or stops gradients.

        A dispatch mode cannot do this: it runs below autograd.
        """
        import torch
        from torch.overrides import TorchFunctionMode

        def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = getattr(func, "__name__", "")
            if name in IGNORED_FUNCTIONS or _caller() is None:
                return func(*args, **kwargs)
            number = len(self.calls)
            self.calls.append((name, path()))
            if number in self.through:
                return args[0]
            out = func(*args, **kwargs)
            stops = number in self.stops and torch.is_tensor(out)
            return out.detach() if stops else out

        class Functions(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return called(func, args, kwargs or {})

        return Functions()


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], change: Change) -> Any:
    """Returns the replacement's result; for in-place operations it is written to `args[0]`."""
    if not func._schema.is_mutable:
        return change(func, args, kwargs)
    # A change may call the operation several times, each time from the original value.
    before = args[0].clone()

    def functional(*args: Any, **kwargs: Any) -> Any:
        made = before.clone()
        return func(made, *args[1:], **kwargs)

    made = change(functional, (before, *args[1:]), kwargs)
    return args[0].copy_(made)


def _closed(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments, a slice's end being at most the size of its axis.

    Torch passes 2**63 - 1 for an open end, which no sentence should show.
    """
    if func.overloadpacket.__name__ != "slice":
        return args
    padded: list[Any] = [*args, *[None] * (4 - len(args))]
    x, axis, start, end, *step = padded
    return args if end is None else (x, axis, start, min(end, x.shape[axis]), *step)


def _copied(x: Any) -> Any:
    import torch

    return x.clone() if torch.is_tensor(x) else x


def _caller() -> tuple[str, int] | None:
    """Returns file and line that called an operation; None if this package called it."""
    # Operations of this package's own recording are not part of the module's computation.
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_own_code = code.co_filename.startswith(PACKAGE_DIR)
        if is_own_code and code.co_name not in GRADIENT_FUNCTIONS and code.co_name != "_caller":
            return None
        if not is_own_code and not code.co_filename.endswith(OPERATIONS):
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _shapes(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns shapes and plain values, which distinguish calls on the same line."""
    import torch

    flat = (x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,)))
    return tuple(tuple(x.shape) if torch.is_tensor(x) else repr(x) for x in flat)


def with_arguments(places: Mapping[int, Any]) -> Change:
    """Returns a change that calls the operation with these arguments replaced by index."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*(places.get(i, x) for i, x in enumerate(args)), **kwargs)

    return change
