"""One call of a torch module: which inputs are tokens, and the same call at another length."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import jax
import numpy as np

from .tables import (
    angles,
    are_angles,
    columns_of,
    even_steps,
    evenly,
    is_additive,
    is_mask,
    resized,
)

BATCH_FIRST, TOKENS_FIRST = (0, 1, 2), (1, 0, 2)


@dataclass(frozen=True)
class Call:
    """The arguments of a call, flat.

    Attributes:
      leaves: arrays and other objects.
      tree: where they stand in `(args, kwargs)`.
      run: called as `run(module, *args, **kwargs)`.
      groups: indices of the leaves that are the tokens; of those that are a memory, if there is
        one, and of other values of it. Equal arrays are one input.
      table_places: indices of the cosines and of the sines, or of exp(i angle) for both; () for
        none.
      order: axes of batch, tokens and features.
    """

    leaves: tuple[Any, ...]
    tree: Any
    run: Callable[..., Any]
    groups: tuple[tuple[int, ...], ...] = ()
    table_places: tuple[int, ...] = ()
    order: tuple[int, int, int] = BATCH_FIRST

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[..., Any]
    ) -> "Call":
        """Reads the roles of a call's arguments.

        Raises:
          ValueError: if no argument is a floating array of two or three axes.
        """
        leaves, tree = jax.tree.flatten((args, dict(kwargs)))
        call = cls(tuple(map(_as_numpy, leaves)), tree, run)
        wide = [i for i in call.arrays if call.leaves[i].dtype.kind == "f"]
        by_rank = {rank: [i for i in wide if call.leaves[i].ndim == rank] for rank in (3, 2)}
        if not by_rank[3] + by_rank[2]:
            shapes = [getattr(x, "shape", type(x).__name__) for x in leaves]
            raise ValueError(
                "identify takes the tokens as a floating array of three axes, such as `B T D`; "
                f"got {shapes}. Attention over images it does not name: docs/layers.md lists such "
                "layers, as WindowAttention, and plan maps their weights."
            )
        first, *others = by_rank[3] or by_rank[2]
        call = replace(call, groups=(call._equal_to(first),))
        call = replace(call, table_places=call._tables())
        for i in others:
            if i not in (*call.table_places, *call.placed) and call._is_memory(i):
                call = replace(call, groups=(*call.groups, call._equal_to(i)))
        return call

    @property
    def arrays(self) -> list[int]:
        """Indices of the arrays."""
        return [i for i, x in enumerate(self.leaves) if isinstance(x, np.ndarray)]

    @property
    def placed(self) -> list[int]:
        """Indices of tokens and memories."""
        return [i for group in self.groups for i in group]

    @property
    def others(self) -> list[int]:
        """Indices of arrays that are neither tokens nor memories nor tables of angles."""
        return [i for i in self.arrays if i not in (*self.placed, *self.table_places)]

    @property
    def inputs(self) -> list[np.ndarray]:
        """The tokens, and memories."""
        return [self.leaves[group[0]] for group in self.groups]

    @property
    def axis(self) -> int:
        """That of the tokens."""
        return self.order[1] if self.inputs[0].ndim == 3 else 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.inputs[0].shape[self.axis]

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.inputs[min(1, len(self.groups) - 1)].shape[self.axis]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.inputs[0].shape[self.order[0]] if self.inputs[0].ndim == 3 else 1

    def modules(self) -> list[Any]:
        """torch modules that the caller's function refers to, such as one that makes tables."""
        import torch

        if not inspect.isfunction(self.run):
            return []
        names = inspect.getclosurevars(self.run)
        values = (*names.nonlocals.values(), *names.globals.values())
        return [x for x in values if isinstance(x, torch.nn.Module)]

    def with_inputs(self, *inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tokens and memories."""
        leaves = list(self.leaves)
        for group, x in zip(self.groups, inputs, strict=True):
            for i in group:
                leaves[i] = x
        return jax.tree.unflatten(self.tree, leaves)

    def with_tokens(self, *inputs: np.ndarray) -> "Call":
        """The call with other tokens and memories."""
        return replace(self, leaves=tuple(jax.tree.leaves(self.with_inputs(*inputs))))

    def exact(self, layer: Any) -> "Call":
        """The call with tables and even biases in float64, where torch computed them in float32.

        Tables of angles that are the layer's are made by its rotary.
        """
        leaves = list(self.leaves)
        for i in self.others:
            if leaves[i].dtype.kind == "f" and leaves[i].ndim:
                leaves[i] = evenly(leaves[i], leaves[i].ndim - 1, leaves[i].shape[-1])
        return replace(self, leaves=tuple(self._with_tables(leaves, self.length, layer)))

    def at(self, length: int, seed: int, layer: Any) -> "Call":
        """The same call with random tokens, and masks and tables for another length.

        Args:
          length: number of tokens; a memory has as many more or fewer as now.
          seed: of the tokens and the memory.
          layer: tables that are its own are made by its rotary, a mask that is its own by its mask.
        """
        sizes = {self.length: length, self.keys: max(1, self.keys + length - self.length)}
        leaves, random = list(self.leaves), np.random.RandomState(seed)
        for group in self.groups:
            shape = list(self.leaves[group[0]].shape)
            shape[self.axis] = sizes[shape[self.axis]]
            drawn = random.standard_normal(shape)
            for i in group:
                leaves[i] = drawn
        for i in self.others:
            for before, after in sizes.items():
                leaves[i] = resized(leaves[i], before, after, getattr(layer, "mask", None))
        return replace(self, leaves=tuple(self._with_tables(leaves, length, layer)))

    def rates(self) -> list[np.ndarray]:
        """The angles of the second token in the tables, each once, falling; [] without tables."""
        if not self.table_places:
            return []
        cos, sin = self._rows()
        return [np.unique(np.arctan2(sin[1], cos[1]))[::-1]]

    def slopes(self) -> Iterator[np.ndarray]:
        """Steps of biases that grow evenly with the key, one for each head of a sequence."""
        for i in self.others:
            x = self.leaves[i]
            steps = even_steps(x, x.ndim - 1) if x.dtype.kind == "f" and x.ndim > 2 else None
            if steps is not None:
                each = steps.reshape(-1)
                first = each[: max(1, len(each) // self.batch)]  # where sequences have the same
                yield first if np.array_equal(np.resize(first, each.shape), each) else each

    def masks(self) -> Iterator[np.ndarray]:
        """What the masks of the call may mean: True where a query may attend, `B N T S`."""
        for i in self.others:
            x = self.leaves[i]
            if x.shape[-1:] != (self.keys,) or not is_mask(x):
                continue
            is_float = x.dtype.kind == "f" and is_additive(x)
            for visible in [x == 0] if is_float else [x.astype(bool), ~x.astype(bool)]:
                if x.ndim == 2 and x.shape[0] == self.batch:  # of keys alone
                    yield visible[:, None, None]
                elif x.ndim == 3 and x.shape[0] > self.batch:  # of each head, `(B N) T S`
                    yield visible.reshape(self.batch, -1, *x.shape[1:])
                else:
                    yield visible[:, None] if x.ndim == 3 else visible

    def _equal_to(self, i: int) -> tuple[int, ...]:
        return tuple(j for j in self.arrays if np.array_equal(self.leaves[i], self.leaves[j]))

    def _is_memory(self, i: int) -> bool:
        x = self.leaves[i]
        is_bias = even_steps(x, x.ndim - 1) is not None
        tokens = self.inputs[0].shape
        is_batch = x.ndim == len(tokens) == 3 and (
            x.shape[0] == tokens[0] or x.shape[1] == tokens[1]
        )
        return is_batch and not is_bias and not is_additive(x)

    def _tables(self) -> tuple[int, ...]:
        """The first complex array of this length, or the first two that are cosines and sines."""
        arrays = [i for i in self.arrays if self.length in self.leaves[i].shape[:-1]]
        complex_ones = ((i,) for i in arrays if self.leaves[i].dtype.kind == "c")
        pairs = permutations(arrays, 2)
        real = ((i, j) for i, j in pairs if are_angles(self.leaves[i], self.leaves[j]))
        return next(complex_ones, next(real, ()))

    def _rows(self) -> list[np.ndarray]:
        """Cosines and sines of the tables, `T W`."""
        tables = [self.leaves[i] for i in self.table_places]
        tables = tables if len(tables) == 2 else [tables[0].real, tables[0].imag]
        axis = tables[0].shape.index(self.length)
        return [np.moveaxis(x, axis, -2).reshape(-1, self.length, x.shape[-1])[0] for x in tables]

    def _with_tables(self, leaves: list[Any], length: int, layer: Any) -> list[Any]:
        """The leaves with the tables of a layer's rotary, if those of the call are its."""
        rotary = getattr(layer, "rotary", None)
        if (
            not self.table_places
            or rotary is None
            or (its := columns_of(rotary, self._rows())) is None
        ):
            return leaves
        width, columns = its
        tables = [x[:, columns] for x in angles(rotary, width, length) or ()]
        tables = tables if len(self.table_places) == 2 else [tables[0] + 1j * tables[1]]
        for i, table in zip(self.table_places, tables, strict=True):
            shape = list(self.leaves[i].shape)
            axis = shape.index(self.length)
            shape[axis] = length
            spread = np.expand_dims(table, [*range(1, len(shape) - axis - 1)])
            leaves[i] = np.broadcast_to(spread, shape).copy()
        return leaves


def first_output(result: Any) -> Any:
    """The output of a module that returns one, or several of which the first is meant."""
    if hasattr(result, "shape"):
        return result
    return first_output(next(iter(result.values())) if isinstance(result, Mapping) else result[0])


def as_tensors(value: Any) -> Any:
    """Arrays as tensors, floating ones in float64."""
    import torch

    def one(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        wide = {"f": np.float64, "c": np.complex128}.get(x.dtype.kind, x.dtype)
        return torch.from_numpy(np.array(x, wide, order="C"))

    return jax.tree.map(one, value)


def _as_numpy(x: Any) -> Any:
    """An array of jax or torch as one of numpy; other objects as they are."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        return (x.float() if x.is_floating_point() and x.itemsize < 4 else x).numpy()
    return np.asarray(x) if isinstance(x, jax.Array) else x
