"""One run of one module: what goes in, and what is recorded of it on either side."""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import draw


@dataclass
class Run:
    """Everything recorded of one forward and backward pass, as numpy arrays.

    Attributes:
      outputs: by name: "output", or "output[0]", "output.key" where there are several.
      taps: outputs of submodules and named points, by path, in the order of the calls.
      gradients: of inputs ("input x") and parameters (the module's own names).
      keeps: dropout's keep-masks, in the order they were drawn.
      tap_gradients: of taps, where they are known.
      state: running statistics after the call, by path.
      calls: what each tap of torch was computed from.
      notes: sentences about the run.
      findings: of the program that ran: products below the asked precision, hidden casts.
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: list[np.ndarray] = field(default_factory=list)
    tap_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    calls: dict[str, "Call"] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One operation on every element between a product and the softmax.

    Attributes:
      name: torch's, without underscores at its end.
      place: which operand the value itself is.
      others: the operands, None in the value's place.
      shape: of the result.
    """

    name: str
    place: int
    others: tuple[Any, ...]
    shape: tuple[int, ...]


@dataclass
class Call:
    """What one tap was computed from, in torch.

    Attributes:
      kind: the type name of a submodule, or the name of a point inside attention.
      inputs: its array arguments; of a point, the points it follows from.
      params: the submodule's own parameters and buffers, by role.
      facts: the submodule's own numbers, eps say.
      steps: of scores, what was done to the product of query and key.
    """

    kind: str
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What both sides are asked to run.

    Attributes:
      args, kwargs: the call's arguments; numpy arrays are inputs, anything else is passed as it is.
      seed: of the cotangents.
      train: whether both modules are in train mode.
      grads, taps: whether gradients and taps are wanted.
      constants: names of inputs that are not differentiated, nor is anything below them.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    train: bool
    grads: bool
    taps: bool
    constants: frozenset[str] = frozenset()

    def arrays(self) -> dict[str, np.ndarray]:
        """The input arrays by name: a keyword, or a position."""
        named = {**{str(i): arg for i, arg in enumerate(self.args)}, **self.kwargs}
        return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}

    def fill(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with `values` in the arrays' places."""
        args = tuple(values.get(str(i), arg) for i, arg in enumerate(self.args))
        return args, {name: values.get(name, value) for name, value in self.kwargs.items()}

    def cotangent(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The random numbers that an output is multiplied with before gradients are taken."""
        return draw.normal(self.seed, f"cotangent/{name}", shape)


def is_floating(array: Any) -> bool:
    """Whether a numpy array holds floating numbers, bfloat16 included."""
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float16")


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """`array` in `dtype` if it is floating, else as it is."""
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return array.astype(kind) if is_floating(array) else array


def leaves(
    value: Any, is_leaf: Callable[[Any], bool], name: str = "output"
) -> Iterator[tuple[str, Any]]:
    """Every array in what a module returned, with its name; None and other things are left out."""
    if is_leaf(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, is_leaf, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves(part, is_leaf, f"{name}[{i}]")


def one_or(path: str, value: Any, is_leaf: Callable[[Any], bool]) -> Callable[[str], str]:
    """How the arrays of a submodule's output are called: a single one by the submodule's path."""
    several = len(list(leaves(value, is_leaf, path))) != 1
    return lambda name: name if several else path


def rebuilt(
    value: Any, is_leaf: Callable[[Any], bool], change: Callable[[str, Any], Any], name: str
) -> Any:
    """What a module returned, with `change(name, array)` in every array's place."""
    if is_leaf(value):
        return change(name, value)
    if isinstance(value, Mapping):
        parts = {k: rebuilt(part, is_leaf, change, f"{name}.{k}") for k, part in value.items()}
        if type(value) is dict:
            return parts
        other: Any = copy.copy(value)
        for key, part in parts.items():
            other[key] = part
        return other
    if isinstance(value, list | tuple):
        items = [rebuilt(x, is_leaf, change, f"{name}[{i}]") for i, x in enumerate(value)]
        make = getattr(type(value), "_make", type(value))
        return make(items)
    return value


def counted(taps: dict[str, Any], name: str) -> str:
    """`name`, or `name#2` and so on if it was seen before."""
    count, unique = 1, name
    while unique in taps:
        count += 1
        unique = f"{name}#{count}"
    return unique
