"""Records torch's forward pass as a program of operations, each of which can be evaluated again.

The program is functional. An operation in place gives a new value to its operand and to every
other view of that memory, so that a change of one operation reaches all that depends on it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .torch.dispatch import dispatch_mode
from .torch.memory import copied, overlap, scattered, storage_of, view_key, viewed

PACKAGE_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Files of torch whose frames are skipped when looking for the caller.
BETWEEN = tuple(
    os.path.join("torch", x) for x in ("_ops.py", "_dynamo", "_compile.py", "utils/_contextlib.py")
)
# Operations whose kernels do not check the shapes of their arguments.
KERNELS = ("_weight_norm_interface", "native_layer_norm", "native_group_norm", "native_batch_norm")
# Operations whose kinds in place and otherwise are the same function.
ELEMENTWISE = ("add", "sub", "mul", "div", "neg", "sigmoid", "tanh", "relu", "exp", "masked_fill")
# Arguments of a batch norm that it changes, and what they are.
STATISTICS = {3: "running mean", 4: "running variance"}
# Modes of this package, which are on the call stack of every operation of the module.
HANDLERS = ("__torch_dispatch__", "__torch_function__", "on_op", "_on_op", "in_float64", "noisy")
# What these functions of this package call is part of the module's program.
FORMULAS = ("attention_formula", "_steps", "_broadcast", "_flat", "without_empty_rows")


# Begin the names of values in `Tape.marks`.
PARAMETER, INPUT, OUTPUT = "parameter ", "input ", "output "


class Ref(NamedTuple):
    """The number of a value, in the place of a tensor among an operation's arguments."""

    value: int


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
      number: number of operations before it.
      name: torch's name of it, without the underscore of variants in place.
      func: evaluates it; never in place.
      args, kwargs: its arguments, tensors as `Ref`.
      outs: numbers of the values that it gives; -1 for what is no tensor.
      several: whether it returns a tuple or a list.
      path: path of the innermost running submodule.
      site: path, source file and line, line of a formula of this package, operation and argument
        shapes; None if this package called it.
      grad: whether autograd was enabled.
      schema: names of its arguments with their default values.
      overload: torch's name of the variant.
    """

    number: int
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int, ...]
    several: bool
    path: str
    site: tuple[Any, ...] | None
    grad: bool
    schema: Mapping[str, Any]
    overload: str = ""

    @cached_property
    def is_flat(self) -> bool:
        """Whether no list among its arguments, and no keyword, is a value."""
        inner = (
            x
            for y in (*self.args, *self.kwargs.values())
            if y.__class__ is not Ref
            for x in flat([y])
        )
        return not any(isinstance(x, Ref) for x in inner)

    @cached_property
    def operands(self) -> list[int]:
        """Numbers of the values that it is computed from."""
        return [x.value for x in flat((*self.args, *self.kwargs.values())) if isinstance(x, Ref)]


def flat(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with the elements of lists among them."""
    for x in args:
        if isinstance(x, list) or (isinstance(x, tuple) and not isinstance(x, Ref)):
            yield from flat(x)
        else:
            yield x


def mapped(args: Any, change: Callable[[Any], Any]) -> Any:
    """`args` with `change` applied to every element that is no list or tuple."""
    if isinstance(args, list) or (isinstance(args, tuple) and not isinstance(args, Ref)):
        return type(args)(mapped(x, change) for x in args)
    return change(args)


@dataclass
class Tape:
    """A recorded forward pass.

    Attributes:
      nodes: its operations.
      values: every value, as it was when it was computed.
      producers: for each value the number of its operation, -1 if it came from outside.
      marks: numbers of values by name: "tap NAME", "output NAME", "argument 0 NAME".
      names: names of parameters, buffers and inputs by number of value.
      of_package: whether operations that this package calls are part of the program.
      site: file, line and 0 of the program that these are part of.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    producers: list[int] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    of_package: bool = False
    site: tuple[str, int, int] | None = None
    _current: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _entered: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _detached: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _aliases: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    _in_memory: dict[int, list[int]] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)
    _storages: dict[int, str] = field(default_factory=dict)
    _stopped: bool = False

    def mode(self, named: Mapping[str, Any], path: Callable[[], str] = lambda: "") -> Any:
        """Returns a dispatch mode that records every operation.

        Args:
          named: parameters, buffers and inputs by name.
          path: returns the path of the running submodule.
        """
        # By storage address, so that views such as `weight.T` are recognised too.
        self._storages = {storage_of(x): name for name, x in named.items() if x.numel()}

        def on_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._stopped:
                return func(*args, **kwargs)
            return self._record(func, args, kwargs, path())

        return dispatch_mode(on_op)

    def stop(self) -> None:
        """Ends the recording: what follows is the backward pass."""
        self._stopped = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing in the block."""
        before, self._stopped = self._stopped, True
        try:
            yield
        finally:
            self._stopped = before

    def add(self, name: str, func: Callable[..., Any], args: Any, outs: list[Any]) -> None:
        """Notes an operation that is none of torch's, with its operands and results."""
        with self.paused():
            refs = tuple(map(self._ref, args))
            self._add(func, name, refs, {}, outs, ("", ("", *(self.site or ()), name), True, {}))

    def mark(self, name: str, tensor: Any) -> None:
        """Notes which value is a tap, an output or an argument of a submodule."""
        if not self._stopped:
            # A view that shows all of a parameter or an input is another value, and no leaf.
            leaf = name.startswith((PARAMETER, INPUT))
            first = self._entered.get(view_key(tensor)) if leaf else None
            self.marks[name] = self.number(tensor) if first is None else first

    def number(self, tensor: Any) -> int:
        """The number of a tensor's value; a new one if it came from outside."""
        key = view_key(tensor)
        # A detached tensor is the same view of memory, but no gradient passes through it.
        if key in self._detached and not tensor.requires_grad:
            return self._detached[key]
        if key not in self._current:
            turned = self._current.get(view_key(tensor.mT)) if tensor.ndim > 1 else None
            if turned is not None:
                self._add(lambda x, *_: x.mT, "transpose", (Ref(turned), -2, -1), {}, tensor)
                return self._current[key]
            base = self._base(key)
            if base is None:
                return self._new(tensor, -1)
            refs = (Ref(base), *key[1:4], tuple(self._strides(base)))
            self._add(viewed, "as_strided", refs, {}, tensor)
        return self._current[key]

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> Any:
        import torch

        site = self.site or _caller()
        if site is None and not self.of_package and not func._schema.is_mutable:
            return func(*args, **kwargs)  # this package only reads values
        refs, named = (mapped(x, self._ref) for x in (args, [*kwargs.values()]))
        written = _written(func, args, kwargs)
        statistics = args[3:5] if "batch_norm" in func.overloadpacket.__name__ else ()
        statistics = [x for x in statistics if torch.is_tensor(x)]  # updated without a word
        for tensor in (*written, *statistics):
            self._freeze(tensor)
        grad = torch.is_grad_enabled()
        out = func(*args, **kwargs)
        if "NONDETERMINISTIC_SEEDED" in str(func.tags).upper() and not written:
            for x in flat([out]):
                if torch.is_tensor(x):
                    self._new(x, -1)
            return out
        name = func.overloadpacket.__name__
        where = (path, *site, func, _shapes_and_values(args)) if site else None
        schema = {x.name: x.default_value for x in func._schema.arguments}
        in_place = bool(written) or "batch_norm" in name  # whose statistics no schema mentions
        function = _functional(func) if in_place else _reshaping(func, name)
        function = _guarded(function, _sizes(args)) if name in KERNELS else function
        kind = name.rstrip("_") if name.rstrip("_") else name
        facts = refs, dict(zip(kwargs, named, strict=True))
        self._add(function, kind, *facts, out, (path, where, grad, schema, func._overloadname))
        for tensor in written:
            self._rewrite(tensor)
        for tensor in statistics:
            self._current.pop(view_key(tensor), None)
        for place, kind in STATISTICS.items() if statistics and args[5] else ():
            facts = refs[place], refs[0], args[6]
            self._add(_averaged(kind), kind, facts, {}, args[place], (path, where, False, {}))
        return out

    def _ref(self, x: Any) -> Any:
        import torch

        return Ref(self.number(x)) if torch.is_tensor(x) else x

    def _new(self, tensor: Any, producer: int, detached: bool = False) -> int:
        key, number = view_key(tensor), len(self.values)
        self.values.append(tensor.detach())
        self.producers.append(producer)
        if producer < 0:
            self._entered.setdefault(key, number)
        self._alive.append(tensor.untyped_storage())
        self._in_memory.setdefault(key[0], []).append(number)
        (self._detached if detached else self._current)[key] = number
        self._aliases.setdefault(key[0], []).append(key)
        if key[0] in self._storages:
            self.names[number] = self._storages[key[0]]
        return number

    def _add(
        self,
        func: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: dict[str, Any],
        out: Any,
        where: tuple[Any, ...] = ("", None, True, {}),
    ) -> None:
        import torch

        number = len(self.nodes)
        several = isinstance(out, tuple | list)
        stopped = name == "detach" or self._views_detached(args, out)
        outs = tuple(
            self._new(x, number, stopped) if torch.is_tensor(x) else -1
            for x in (out if several else [out])
        )
        self.nodes.append(Node(number, name, func, args, kwargs, outs, several, *where))

    def _views_detached(self, args: Any, out: Any) -> bool:
        """Whether a result is the same view of memory as a detached operand."""
        import torch

        operand = next((x.value for x in flat(args) if isinstance(x, Ref)), None)
        same = torch.is_tensor(out) and self._detached.get(view_key(out), -1) == operand
        return operand is not None and same

    def _freeze(self, tensor: Any) -> None:
        """Copies the values in memory that is about to be overwritten."""
        for number in self._in_memory.pop(storage_of(tensor), ()):
            self.values[number] = copied(self.values[number])

    def _rewrite(self, tensor: Any) -> None:
        """Gives new values to all other views of memory that an operation has overwritten."""
        key = view_key(tensor)
        changed = self._current[key]
        whole = self._whole(key[0])
        aliases = self._aliases.get(key[0], ())
        others = [k for k in aliases if k not in (key, whole) and overlap(k, key)]
        if whole is not None and whole != key:
            refs = Ref(self._current[whole]), Ref(changed), *key[1:4], whole[2]
            owner = tensor.as_strided(*whole[1:3], whole[3])
            self._add(scattered, "as_strided_scatter", refs, {}, owner)
        for other in others:
            self._current.pop(other, None)
        for view in aliases:
            if overlap(view, key):
                self._detached.pop(view, None)
        self._aliases[key[0]] = [k for k in dict.fromkeys(aliases) if k not in others]

    def _whole(self, storage: int) -> tuple[Any, ...] | None:
        """The known view of a storage that has all its elements, without gaps."""
        for key in self._aliases.get(storage, ()):
            count = 1
            for size in key[1]:
                count *= size
            if key in self._current and key[3] == 0 and count == key[5] and not any(key[6:]):
                return key
        return None

    def _base(self, key: tuple[Any, ...]) -> int | None:
        whole = self._whole(key[0])
        same = whole is not None and whole[4] == key[4] and not any(key[6:])
        return self._current[whole] if whole is not None and same else None

    def _strides(self, number: int) -> tuple[int, ...]:
        return tuple(self.values[number].stride())


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an operation overwrites."""
    import torch

    if not func._schema.is_mutable:
        return []
    named = {x.name: x for x in func._schema.arguments if x.alias_info and x.alias_info.is_write}
    both = {x.name: y for x, y in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return [x for name in named for x in flat([both.get(name)]) if torch.is_tensor(x)]


def _functional(func: Any) -> Callable[..., Any]:
    """An operation that is in place otherwise: torch's own, or on copies of its arguments."""
    import torch

    name = func.overloadpacket.__name__.rstrip("_")
    if name in ELEMENTWISE:
        return getattr(getattr(torch.ops.aten, name), func._overloadname)

    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*(x.clone() if torch.is_tensor(x) else x for x in args), **kwargs)

    return call


def _averaged(kind: str) -> Callable[..., Any]:
    """What a batch norm does to one of its statistics: moves it by a share to that of its input."""

    def call(before: Any, x: Any, share: float) -> Any:
        axes = [0, *range(2, x.ndim)]
        new = x.mean(axes) if kind == STATISTICS[3] else x.var(axes)
        return (1 - share) * before + share * new

    return call


def _guarded(func: Callable[..., Any], sizes: list[Any]) -> Callable[..., Any]:
    """A kernel that reads past the end of arrays of other shapes than it was called with."""

    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        if any(y not in (None, x) for x, y in zip(sizes, _sizes(args), strict=True)):
            raise ValueError(f"a kernel for shapes {sizes} was given {_sizes(args)}.")
        return func(*(x.contiguous() if torch.is_tensor(x) else x for x in args), **kwargs)

    return call


def _sizes(args: Sequence[Any]) -> list[Any]:
    import torch

    return [tuple(x.shape) if torch.is_tensor(x) else None for x in args]


def _reshaping(func: Any, name: str) -> Callable[..., Any]:
    """A view of memory as a reshape: a changed value may lie in memory otherwise."""
    if name in ("view", "_unsafe_view", "_reshape_alias") and "dtype" not in func._overloadname:
        return lambda x, size, *_: x.reshape(size)
    return func


def _caller() -> tuple[str, int, int] | None:
    """Returns file and line that called an operation, and the line of a formula or 0.

    None if this package called it.
    """
    # Operations of this package's own recording are not part of the module's computation.
    frame, by_package, line = sys._getframe(2), False, 0
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE_DIR):
            ours = code.co_name not in (*HANDLERS, "_record", "<genexpr>")
            if ours and not by_package and code.co_name in FORMULAS:
                line = frame.f_lineno
            by_package |= ours
        elif not any(x in code.co_filename for x in BETWEEN):
            called = (code.co_filename, frame.f_lineno, line)
            return None if by_package and not line else called
        frame = frame.f_back
    return None


def _shapes_and_values(args: Sequence[Any]) -> tuple[Any, ...]:
    """Shapes and plain values, which distinguish calls on the same line."""
    import torch

    return tuple(tuple(x.shape) if torch.is_tensor(x) else repr(x) for x in flat(args))
