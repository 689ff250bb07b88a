"""Torch's run made with one mistake in it: some of its operations give something else."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .torch_dispatch import dispatch_mode

Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Mistakes = Iterator[tuple[str, Change]]  # each as a sentence, and what is done instead
Named = Callable[[Any], str]  # what a tensor is called, "" if nobody gave it a name
# What is no calculation, or is called where gradients are noted.
IGNORED_FUNCTIONS = ("__get__", "__set__", "register_hook", "_set_grad_enabled", "requires_grad_")
# Functions of this package through which an operation of the module comes.
GRADIENT_FUNCTIONS = (
    "__torch_dispatch__",
    "__torch_function__",
    "on_op",
    "_on_op",
    "in_float64",
    "noisy",
    "called",
)
# What torch adds where somebody else holds a tensor too, as the notes of a run do.
IGNORED_OPS = ("detach", "alias", "lift_fresh")
# Where torch calls its operations by their names.
OPERATIONS = os.path.join("torch", "_ops.py")
PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(frozen=True)
class Operation:
    """One operation of a run, as it was called.

    Attributes:
      number: how many came before it.
      site: where it stands: the submodule, the line of code, its name, what shapes it took.
      path: of the innermost submodule that it ran in.
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
        """Torch's name of it, of one that works in place too without the underscore."""
        return self.func.overloadpacket.__name__.rstrip("_")


@dataclass
class Changes:
    """What is done to a run's operations: by number, something else; without, they are noted.

    Attributes:
      by_number: what is done in the place of an operation.
      noted: all operations of the run, if nothing is changed.
      count: how many operations there have been.
      through: numbers of calls of a `detach` that let gradients go on.
      stops: numbers of other calls of a function of torch behind which no gradient goes on.
      calls: the names of all those calls, and of the submodules that they are made in.
      names: of the module's parameters and buffers, by where their numbers lie.
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
        """Whether it is gradients that the changes are of."""
        return bool(self.through or self.stops)

    def mode(self, module: Any, path: Callable[[], str]) -> Any:
        """A dispatch mode that does it in a module, and asks which submodule is running."""
        tensors = (*module.named_parameters(), *module.named_buffers())
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
            copied = tuple(map(_copied, args)) if func._schema.is_mutable else args
            out = func(*args, **kwargs)
            site = (path(), *place, func, _shapes(args))
            self.noted.append(Operation(number, site, path(), func, copied, kwargs, out))
            return out

        return dispatch_mode(on_op)

    def functions(self, path: Callable[[], str]) -> Any:
        """A mode that counts calls of torch's functions, and changes where gradients go."""
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
    """What a change gives; of an operation that works in place it goes where that would."""
    if not func._schema.is_mutable:
        return change(func, args, kwargs)
    before = args[0].clone()

    def functional(*args: Any, **kwargs: Any) -> Any:
        made = before.clone()
        return func(made, *args[1:], **kwargs)

    made = change(functional, (before, *args[1:]), kwargs)
    return args[0].copy_(made)


def _copied(x: Any) -> Any:
    import torch

    return x.clone() if torch.is_tensor(x) else x


def _caller() -> tuple[str, int] | None:
    """The line of code that called an operation, torch's own modules among them; None if this
    package did."""
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
    """What tells calls of one line apart: shapes, and plain numbers."""
    import torch

    flat = (x for arg in args for x in (arg if isinstance(arg, tuple | list) else (arg,)))
    return tuple(tuple(x.shape) if torch.is_tensor(x) else repr(x) for x in flat)


def with_arguments(places: Mapping[int, Any]) -> Change:
    """The operation with other arguments at these places."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*(places.get(i, x) for i, x in enumerate(args)), **kwargs)

    return change
