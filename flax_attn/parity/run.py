"""One run of one module: what goes in, and what is recorded of it on either side."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import draw


@dataclass
class Run:
    """Everything recorded of one forward and backward pass, as numpy arrays.

    Attributes:
      outputs: by name: "output", or "output[0]", "output.key" where there are several.
      taps: outputs of submodules and named points, by path, in the order of the calls.
      gradients: of inputs ("input x") and parameters (the module's own names).
      keeps: dropout's keep-masks, in the order they were drawn.
    """

    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    taps: dict[str, np.ndarray] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    keeps: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What both sides are asked to run.

    Attributes:
      args, kwargs: the call's arguments; numpy arrays are inputs, anything else is passed as it is.
      seed: of the cotangents.
      train: whether both modules are in train mode.
      grads, taps: whether gradients and taps are wanted.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    train: bool
    grads: bool
    taps: bool

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


def counted(taps: dict[str, Any], name: str) -> str:
    """`name`, or `name#2` and so on if it was seen before."""
    count, unique = 1, name
    while unique in taps:
        count += 1
        unique = f"{name}#{count}"
    return unique
