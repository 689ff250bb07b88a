"""How arrays are cut: the mesh axes of each dimension, from those of the queries."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .._arrays import varying_alike
from .._types import Sizes
from ..places import Places

Axes = Any  # a mesh axis, several of them, or None


class Shards(NamedTuple):
    """The mesh axes over which batch entries and heads are spread."""

    batch: tuple[Axes, ...]
    heads: Axes

    @property
    def queries(self) -> PartitionSpec:
        """Of `*B T N H`: queries, keys, values and outputs."""
        return PartitionSpec(*self.batch, None, self.heads, None)

    @property
    def rows(self) -> PartitionSpec:
        """Of `*B N T`."""
        return PartitionSpec(*self.batch, self.heads, None)

    @property
    def weights(self) -> PartitionSpec:
        """Of `*B N T S`."""
        return PartitionSpec(*self.batch, self.heads, None, None)

    def of(self, axes: str, shape: Sequence[int]) -> PartitionSpec:
        """Of an array that lies along these axes of the weights, as `leaf_axes` names them."""
        along = {"b": self.batch, "n": (self.heads,), "q": (None,), "k": (None,), ".": (None,)}
        whole = [names for axis in axes for names in along[axis]]
        mine = whole[len(whole) - len(shape) :] if axes else [None] * len(shape)
        return PartitionSpec(
            *(names if n > 1 else None for n, names in zip(shape, mine, strict=True))
        )

    @property
    def numbers(self) -> tuple[PartitionSpec, ...]:
        """Of the numbers of the batch entries along each batch axis, and of the heads."""
        return tuple(PartitionSpec(names) for names in (*self.batch, self.heads))

    def count(self, mesh: Any) -> int:
        """Into how many parts the heads are cut."""
        found = 1
        for name in names_in(self.heads):
            found *= mesh.shape[name]
        return found

    def unused(self, spec: PartitionSpec) -> tuple[str, ...]:
        """The mesh axes over which such an array is the same everywhere, so that gradients add."""
        used = {name for entry in spec for name in names_in(entry)}
        mine = [name for entry in (*self.batch, self.heads) for name in names_in(entry)]
        return tuple(name for name in mine if name not in used)


def names_in(entry: Axes) -> tuple[str, ...]:
    """The mesh axes of one dimension."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def numbers_of(sizes: Sizes) -> tuple[jax.Array, ...]:
    """Batch entries along each batch axis, and heads, numbered; to be cut as the queries are."""
    return tuple(jnp.arange(n, dtype=jnp.int32) for n in (*sizes.batch, sizes.N))


def places_of(numbers: Sequence[jax.Array], batch: Sequence[int]) -> Places:
    """Where a shard with these numbers stands in a whole with these batch axes."""
    *entries, heads = numbers
    whole = jnp.zeros(tuple(len(x) for x in entries), jnp.int32)
    for axis, (x, size) in enumerate(zip(entries, batch, strict=True)):
        whole = whole * size + x.reshape([-1 if i == axis else 1 for i in range(len(batch))])
    return Places(whole, heads)


def part_of(x: jax.Array, axes: str, numbers: Sequence[jax.Array]) -> jax.Array:
    """A shard's part of an array that every device holds whole."""
    along = {"b": [*numbers[:-1]], "n": [numbers[-1]], "q": [None], "k": [None], ".": [None]}
    whole = [mine for axis in axes for mine in along[axis]]
    for i, mine in enumerate(whole[len(whole) - x.ndim :] if axes else ()):
        if mine is not None and x.shape[i] > len(mine):
            x, first = varying_alike((x, mine[0]))
            x = jax.lax.dynamic_slice_in_dim(x, first, len(mine), axis=i)
    return x
