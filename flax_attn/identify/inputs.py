"""The inputs of a call: which array holds the tokens, and the same call at another length."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from .tables import angles_in, resized

# Axes of batch, tokens and features, likely ones first.
ORDERS = ((0, 1, 2), (1, 0, 2), (0, 2, 1))


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call, in which one array holds the tokens.

    Attributes:
      args, kwargs: the arguments.
      call: calls the module with them.
      order: axes of batch, tokens and features in the tokens.
      crosses: whether the second array of three axes is a memory, from which keys and values are.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    call: Callable[..., Any]
    order: tuple[int, int, int] = (0, 1, 2)
    crosses: bool = False

    @classmethod
    def of(
        cls, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[..., Any]
    ) -> "Inputs":
        """The arguments of a call, in which tokens of equal values are one array.

        Raises:
          TypeError: if `module` is no torch module, or an input is a jax or torch array.
          ValueError: if no array holds tokens.
        """
        import torch

        if not isinstance(module, torch.nn.Module):
            kind = module.__name__ if isinstance(module, type) else type(module).__name__
            raise TypeError(f"identify takes an object of a torch.nn.Module; got {kind}.")
        inputs = cls(args, dict(kwargs), call)
        for x in inputs._every():
            if isinstance(x, torch.Tensor | jax.Array):
                raise TypeError(
                    f"identify takes numpy arrays; got a {type(x).__name__} of shape "
                    f"{tuple(x.shape)}: pass np.asarray(x)."
                )
        assert inputs.tokens is not None
        arrays = [x for x in inputs._every() if isinstance(x, np.ndarray) and x.ndim == 3]
        tokens = [x for x in arrays if x.dtype.kind == "f"]
        same = {id(x): next(y for y in tokens if np.array_equal(x, y)) for x in tokens}
        args, keywords = inputs._with(same)
        return cls(args, keywords, call)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The tokens, and the memory if there is one."""
        return [self.tokens, self.memories[0]] if self.crosses else [self.tokens]

    @property
    def memories(self) -> list[np.ndarray]:
        """Other arrays that may be a memory."""
        batch = self.order[0]
        return [
            x
            for x in self._others()
            if x.ndim == 3 and x.dtype.kind == "f" and x.shape[batch] == self.tokens.shape[batch]
        ]

    @property
    def tokens(self) -> np.ndarray:
        """The first array of three axes.

        Raises:
          ValueError: if there is none.
        """
        for x in self._every():
            if isinstance(x, np.ndarray) and x.ndim == 3 and x.dtype.kind == "f":
                return x
        shapes = [getattr(x, "shape", type(x).__name__) for x in self._every()]
        raise ValueError(
            "identify takes the tokens as a floating numpy array of three axes, such as `B T D`; "
            f"got {shapes}."
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Batch, tokens and features."""
        batch, length, features = (self.tokens.shape[axis] for axis in self.order)
        return batch, length, features

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.arrays[-1].shape[self.order[1]]

    @property
    def others(self) -> list[np.ndarray]:
        """Arrays that are neither tokens nor memory."""
        arrays = self.arrays
        return [x for x in self._others() if not any(x is y for y in arrays)]

    @property
    def gives_past(self) -> bool:
        """Whether two arrays look like keys and values of earlier tokens, `B N S H`."""
        shapes = [x.shape for x in self.others if x.ndim == 4 and x.dtype.kind == "f"]
        return len(shapes) > len({*shapes})

    def _others(self) -> list[np.ndarray]:
        tokens = self.tokens
        return [x for x in self._every() if isinstance(x, np.ndarray) and x is not tokens]

    def orders(self) -> Iterator["Inputs"]:
        """The same call with each order that its axes may have, and with a memory if it may be."""
        for order in ORDERS:
            one = replace(self, order=order)
            yield one
            if one.memories:
                yield replace(one, crosses=True)

    def to_btd(self, tokens: Any) -> Any:
        """Tokens as `B T D`."""
        return tokens.transpose(self.order)

    def from_btd(self, tokens: Any) -> Any:
        """Tokens `B T D` in the call's order."""
        return tokens.transpose(tuple(int(i) for i in np.argsort(self.order)))

    def with_arrays(self, *arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tokens and memory, wherever they were an argument."""
        return self._with({id(x): y for x, y in zip(self.arrays, arrays, strict=True)})

    def drawn(
        self, length: int, seed: int, batch: int | None = None, size: float = 1.0
    ) -> "Inputs":
        """The same call with random tokens and memory, and another length and batch.

        Args:
          length: number of tokens; other inputs are continued, see `resized`.
          seed: of the tokens.
          batch: rows of the batch, if only tokens and memory come in; None for as many.
          size: standard deviation of the tokens.
        """
        old, random = self.sizes, np.random.RandomState(seed)
        batch = old[0] if batch is None or self.others else batch
        more = self.keys - old[1]
        keys = self.keys if length == old[1] else length + (more or 2 * self.crosses)
        arrays = []
        for array, tokens in zip(self.arrays, (length, keys), strict=False):
            sizes = batch, tokens, array.shape[self.order[2]]
            drawn = self.from_btd(size * random.standard_normal(sizes))
            arrays.append(np.ascontiguousarray(drawn))
        return self._replaced(arrays, [(old[1], length), (self.keys, keys)])

    def _replaced(
        self, arrays: Sequence[np.ndarray], lengths: Sequence[tuple[int, int]]
    ) -> "Inputs":
        """Other tokens and memory, and the other inputs at other lengths."""
        new = {id(x): y for x, y in zip(self.arrays, arrays, strict=True)}
        before, after = lengths[0]
        angles = angles_in(self.others, before)
        for i, x in enumerate(self.others):
            if i in angles:
                new[id(x)] = angles[i].table(after)
                continue
            made = x
            for old, length in dict(lengths).items():
                made = resized(made, old, length) if old != length else made
            new[id(x)] = made
        args, kwargs = self._with(new)
        return replace(self, args=args, kwargs=kwargs)

    def _with(self, new: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other arrays, by the identity of those that they replace."""

        def put(x: Any) -> Any:
            if isinstance(x, tuple | list):
                return type(x)(map(put, x))
            return new.get(id(x), x)

        return tuple(map(put, self.args)), {name: put(x) for name, x in self.kwargs.items()}

    def in_float64(self, numbers: Sequence[float]) -> "Inputs":
        """The same call with cos and sin in float64, where they were computed in float32."""
        others, length = self.others, self.sizes[1]
        new = {
            id(others[i]): angles.in_float64(numbers).table(length)
            for i, angles in angles_in(others, length).items()
            if _holds_float32(others[i])
        }
        args, kwargs = self._with(new)
        return replace(self, args=args, kwargs=kwargs)

    def _every(self) -> Iterator[Any]:
        left = [*self.args, *self.kwargs.values()]
        while left:
            x = left.pop(0)
            if isinstance(x, tuple | list):
                left = [*x, *left]
            else:
                yield x


def _holds_float32(array: np.ndarray) -> bool:
    narrow = np.complex64 if array.dtype.kind == "c" else np.float32
    return np.array_equal(array.astype(narrow), array)


def first_output(result: Any) -> Any:
    """The output of a module that returns one, or several of which the first is meant."""
    while isinstance(result, Sequence) and not hasattr(result, "shape"):
        result = result[0]
    return result


def as_tensors(value: Any) -> Any:
    """Arrays as tensors, in tuples, lists and dicts too; other objects as they are."""
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value, order="C"))
    if isinstance(value, tuple | list):
        return type(value)(as_tensors(x) for x in value)
    if isinstance(value, dict):
        return {name: as_tensors(x) for name, x in value.items()}
    return value
