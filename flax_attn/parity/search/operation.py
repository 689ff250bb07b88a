"""One recorded operation with its arguments, as the catalogue's rows look at it."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..sides.tape import Node, Ref, Tape, mapped
from .replay import Change, Function

# A sentence and what the operation does otherwise.
Changed = Iterator[tuple[str, Change]]
# Operations that compute no number: they choose, lay out or copy.
VIEWS = frozenset(
    ("view", "_unsafe_view", "_reshape_alias", "t", "transpose", "permute", "unsqueeze", "squeeze",
     "expand", "select", "slice", "clone", "alias", "detach", "as_strided", "unbind", "split",
     "split_with_sizes", "unsafe_split", "chunk", "as_strided_scatter", "_to_copy", "lift_fresh",
     "contiguous", "copy", "diagonal", "unfold", "view_as_real", "view_as_complex", "movedim")
)  # fmt: skip
# Of these, operations whose result has all elements of their operand.
LAYOUT_OPS = VIEWS - {"select", "slice", "as_strided", "unbind", "split", "split_with_sizes",
                      "unsafe_split", "chunk", "as_strided_scatter", "copy", "diagonal", "unfold",
                      "view_as_real", "view_as_complex", "lift_fresh"}  # fmt: skip
PARTS = ("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unbind")
# Folder of torch's formulas of operations, whose lines say nothing to a reader.
DECOMPOSED = os.path.join("torch", "_")
WORDS = {
    "mm": "matrix product", "bmm": "matrix product", "addmm": "linear layer", "mul": "product",
    "add": "sum", "sub": "difference", "div": "quotient", "rsub": "difference",
    "native_layer_norm": "layer norm", "native_group_norm": "group norm",
    "native_batch_norm": "batch norm", "_softmax": "softmax", "_safe_softmax": "softmax",
    "_log_softmax": "log-softmax", "convolution": "convolution", "linalg_vector_norm": "norm",
    "amax": "maximum", "cumsum": "running sum", "embedding": "lookup", "where": "condition",
    "constant_pad_nd": "padding", "cat": "concatenation",
    "lift_fresh": "constant",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One operation, or several of one source line that are changed alike.

    Attributes:
      node: the operation; of several the first.
      tape: the program that it is part of.
      labels: names of values by number.
      entering: numbers of values that enter the span.
      shared: numbers of those that several of its operations use.
    """

    node: Node
    tape: Tape
    labels: Mapping[int, str]
    entering: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def args(self) -> tuple[Any, ...]:
        """Its arguments, as they were."""
        return tuple(mapped(x, self._fill) for x in self.node.args)

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        return {k: mapped(x, self._fill) for k, x in self.node.kwargs.items()}

    def _fill(self, x: Any) -> Any:
        return self.tape.values[x.value] if isinstance(x, Ref) else x

    @cached_property
    def outs(self) -> list[Any]:
        return [self.tape.values[i] for i in self.node.outs if i >= 0]

    @property
    def out(self) -> Any:
        """Its first result."""
        return self.outs[0]

    @cached_property
    def tensors(self) -> dict[int, Any]:
        """Its tensor arguments by index."""
        return {i: self.args[i] for i, x in enumerate(self.node.args) if isinstance(x, Ref)}

    def place(self, name: str) -> int:
        """Index of the argument with a name; -1 if it has none or it was not passed."""
        names = list(self.node.schema)
        place = names.index(name) if name in names else -1
        return place if place < len(self.args) else -1

    def label(self, place: int) -> str:
        """The name of an argument: a parameter, an input, a tap, a number or an operation."""
        x = self.node.args[place]
        return self.called(x.value) if isinstance(x, Ref) else number_text(x)

    def called(self, value: int) -> str:
        """The name of a value."""
        known = [*sources(self.tape, value)]
        named = [self.labels[number] for number in known if number in self.labels]
        if named:
            return named[0]
        x, producer = self.tape.values[known[-1]], self.tape.producers[known[-1]]
        if x.numel() == 1 and not x.is_complex() and producer < 0:
            return number_text(x.item())
        if producer < 0:
            mask = not x.is_complex() and bool(((x == 0) | (x == 1)).all())
            return "a mask of zeros and ones" if mask else f"{list(x.shape)}"
        node = self.tape.nodes[producer]
        if node.several and node.name in PARTS:
            return f"part {node.outs.index(known[-1])} of {self.called(node.operands[0])}"
        if node.name in ("slice", "select"):
            return f"a part of {self.called(node.operands[0])}"
        return described(node)

    def __str__(self) -> str:
        return described(self.node)


def sources(tape: Tape, value: int) -> Iterator[int]:
    """A value, and those that it is only laid out from, such as a kernel of its transpose."""
    yield value
    while tape.producers[value] >= 0 and tape.nodes[tape.producers[value]].name in LAYOUT_OPS:
        value = tape.nodes[tape.producers[value]].operands[0]
        yield value


def described(node: Node) -> str:
    """An operation in words, with its source line.

    The line is in brackets, since it is the original's and not the port's.
    """
    word = WORDS.get(node.name, node.name.strip("_"))
    if node.site is None or DECOMPOSED in node.site[1]:
        return f"the {word}"
    return f"the {word} ({os.path.basename(node.site[1])}:{node.site[2]})"


def number_text(x: Any) -> str:
    """Formats a number or another plain value.

    >>> number_text(0.25), number_text(3), number_text(2**63 - 1)
    ('0.25', '3', 'the end')
    """
    if isinstance(x, int) and not isinstance(x, bool) and abs(x) >= 2**62:
        return "the end"
    return f"{x:.6g}" if isinstance(x, float) else str(x)


def computed(function: Function) -> Change:
    """A change that evaluates the operation otherwise."""
    return Change(function)


def exchanged(args: tuple[Any, ...], places: Mapping[int, Any]) -> tuple[Any, ...]:
    """Arguments with some replaced by index."""
    return tuple(places.get(i, x) for i, x in enumerate(args))


def with_arguments(places: Mapping[int, Any]) -> Change:
    """A change that calls the operation with these arguments replaced by index."""
    return Change(lambda func, args, kwargs: func(*exchanged(args, places), **kwargs))


def operand(place: int) -> Change:
    """A change that returns an argument in the place of the result."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        x, like = args[place], first(func(*args, **kwargs))
        x = x if torch.is_tensor(x) else torch.full_like(like, x)
        return x.to(like.dtype).expand(like.shape).clone()

    return Change(change)


def around(function: Callable[[Any], Any], *places: int) -> Change:
    """A change that applies a function to arguments, or to the first result: -1, or no place."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Kernels of norms take the memory of their weights as it lies.
        changed = {i: function(args[i]).contiguous() for i in places if i >= 0}
        out = func(*exchanged(args, changed), **kwargs)
        if changed:
            return out
        if isinstance(out, tuple | list):
            return type(out)((function(out[0]), *out[1:]))
        return function(out)

    return Change(change)


def first(out: Any) -> Any:
    """The first result of an operation."""
    return out[0] if isinstance(out, tuple | list) else out
