"""Gradients of the arrays that a score reads by index, such as slopes by head or T5's table.

The program of a score reads an array at one element for each query and key. The backward kernels
differentiate it by what it reads, and sum that over the block wherever the index is the same:

    the index depends on    the sum is over            stored as              by the kernel of
    no query and no key     the whole block            B N blocks 1           rows
    the query               keys                       B N T                  rows
    the key                 queries                    B N S                  columns
    both                    where it is each element   B N blocks elements    rows

Outside, these sums are sorted by index and added up. Nothing is added atomically, so every run
gives the same bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._internal.types import Sizes
from .contract import Blocks, Leaf, Program, zeros_at

MAX_ELEMENTS = 512  # that a block may read of one array, whose sums stay in registers


class Read(NamedTuple):
    """A place in a program that reads an array whose gradient is asked for."""

    number: int  # among all that the program reads
    leaf: int
    shape: tuple[int, ...]  # of the array
    kind: str  # "query", "key" or "block": the sum has an element for each
    axes: tuple[int, ...] = ()  # whose index depends on the query and the key

    @property
    def elements(self) -> int:
        """Elements of the array that a block may read, where that depends on both."""
        return math.prod(self.shape[axis] for axis in self.axes)

    def length(self, blocks: Blocks) -> int:
        """How many sums a block has."""
        lengths = {"query": blocks.rows, "key": blocks.columns}
        return lengths.get(self.kind) or 1 << (self.elements - 1).bit_length()

    def add(self, total: jax.Array, at: Sequence[Any], change: jax.Array) -> jax.Array:
        """The sums with those of one more block: its indices, and its gradient by what is read."""
        if self.kind != "block":
            return total + jnp.sum(change, axis=1)  # queries are along the second for keys
        if not self.axes:
            return total + jnp.sum(change)
        place = jnp.zeros((), jnp.int32)
        for axis in self.axes:
            place = place * self.shape[axis] + at[axis]
        place = jnp.broadcast_to(place, change.shape)
        numbers = jax.lax.broadcasted_iota(jnp.int32, total.shape, 0)

        def add_one(element: Any, total: jax.Array) -> jax.Array:
            one = jnp.sum(jnp.where(place == element, change, 0.0))
            return total + jnp.where(numbers == element, one, 0.0)

        # A block far from the diagonal reads few elements, or one.
        return jax.lax.fori_loop(jnp.min(place), jnp.max(place) + 1, add_one, total)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """What is static among residuals, where a value would become an array."""

    reads: tuple[Read, ...] | None


class _Load(NamedTuple):
    """What a program read: of which array, by which indices."""

    leaf: int
    at: tuple[Any, ...]
    value: jax.Array


def reads_of(program: Program, trained: Sequence[bool]) -> tuple[Read, ...] | None:
    """Where a program reads the arrays of which gradients are asked for.

    None if a block may read more than `MAX_ELEMENTS` of one of them, as of an array of all pairs.
    """
    reads: list[Read] = []

    def run() -> None:
        leaves = [Leaf(partial(zeros_at, x.aval.dtype), x.aval.shape) for x in program.leaves]
        shapes = (2, 3), (), (), (2, 1), (1, 3)  # of a logit, b, n, a query and a key
        dtypes = (x.aval.dtype for x in program.run.jaxpr.invars)
        element = [jnp.zeros(*x) for x in zip(shapes, dtypes, strict=True)]
        for number, load in enumerate(_loads(program, leaves, element)):
            if trained[load.leaf]:
                reads.append(_read(number, load, leaves[load.leaf].shape))

    jax.eval_shape(run)
    return None if any(x.elements > MAX_ELEMENTS for x in reads) else tuple(reads)


def _read(number: int, load: _Load, shape: tuple[int, ...]) -> Read:
    rows, columns = jnp.broadcast_shapes((1, 1), *map(jnp.shape, load.at))
    if rows > 1 and columns > 1:
        axes = tuple(axis for axis, x in enumerate(load.at) if jnp.size(x) > 1)
        return Read(number, load.leaf, shape, "block", axes)
    return Read(
        number, load.leaf, shape, "query" if rows > 1 else "key" if columns > 1 else "block"
    )


def _loads(program: Program, leaves: Sequence[Leaf], element: Sequence[Any]) -> list[_Load]:
    """What a program reads, in its order."""
    loads: list[_Load] = []

    def noted(number: int, leaf: Leaf) -> Leaf:
        def load(*at: Any) -> jax.Array:
            loads.append(_Load(number, at, leaf.load(*at)))
            return loads[-1].value

        return Leaf(load, leaf.shape)

    program([noted(*x) for x in enumerate(leaves)], *element)
    return loads


def differentiated(
    program: Program, leaves: Sequence[Leaf], reads: Sequence[Read], logits: Any, index: Any
) -> tuple[jax.Array, Callable[..., Any], list[tuple[Any, ...]]]:
    """Scores of a block, the pullback to its logits and reads, and the indices of the reads."""
    loads = _loads(program, leaves, (logits, *index))

    def score(x: jax.Array, *read: jax.Array) -> jax.Array:
        values = [load.value for load in loads]
        for place, value in zip(reads, read, strict=True):
            values[place.number] = value
        rest: Iterator[jax.Array] = iter(values)
        again = [Leaf(lambda *at: next(rest), leaf.shape) for leaf in leaves]
        return jnp.broadcast_to(program(again, x, *index), x.shape)

    # One for each logit, so that what is hidden can be left out of the sum.
    read = (jnp.broadcast_to(loads[x.number].value, logits.shape) for x in reads)
    x, pull = jax.vjp(score, logits, *read)
    return x, pull, [loads[x.number].at for x in reads]


def gradients_of_reads(
    program: Program,
    arrays: Sequence[jax.Array],
    reads: Sequence[Read],
    sums: Sequence[jax.Array],
    sizes: Sizes,
) -> dict[int, jax.Array]:
    """Gradients of arrays, by their number, in float32.

    Args:
      program: of the score.
      arrays: that it reads.
      reads: whose sums the kernels stored.
      sums: `B N T`, `B N S` or `B N blocks elements`.
      sizes: of the whole attention.
    """
    result: dict[int, jax.Array] = {}
    for read, values in zip(reads, sums, strict=True):
        if read.kind == "block":
            values = values.sum(2)[..., : read.elements]
        at = _indices(program, arrays, read, sizes)
        values = values[..., : at.shape[-1]]
        added = _added_up(read.shape, at, values)
        result[read.leaf] = result.get(read.leaf, 0.0) + added
    return result


def _indices(program: Program, arrays: Sequence[Any], read: Read, sizes: Sizes) -> jax.Array:
    """For each sum the number of its element in the flattened array, `B N` and the sums."""
    b, n, q, k = (jnp.asarray(x, jnp.int32) for x in sizes.iotas())
    q, k = q if read.kind == "query" else q[:, :, :1], k if read.kind == "key" else k[..., :1]
    leaves = [Leaf(partial(_at, x), x.shape) for x in arrays]
    element = (jnp.zeros((1, 1, 1, 1), jnp.float32), b, n, q, k)
    at = list(_loads(program, leaves, element)[read.number].at)
    each = jnp.arange(read.elements, dtype=jnp.int32)[None, None, None]
    parts = jnp.unravel_index(each, tuple(read.shape[axis] for axis in read.axes))
    for axis, part in zip(read.axes, parts, strict=True):
        at[axis] = part
    place = jnp.zeros((sizes.B, sizes.N, 1, 1), jnp.int32)
    for size, index in zip(read.shape, at, strict=True):
        place = place * size + index
    return place.reshape(*place.shape[:2], -1)


def _at(array: jax.Array, *at: Any) -> jax.Array:
    return array[at]


def _added_up(shape: tuple[int, ...], place: jax.Array, values: jax.Array) -> jax.Array:
    """An array with the sum of all values at each place.

    Sorted by place, sums of equal neighbours are a scan; a scatter would add in any order.
    """
    place, values = jnp.broadcast_arrays(place, values)
    place, values = jax.lax.sort((place.ravel(), values.ravel()), num_keys=1)

    def join(a: Any, b: Any) -> Any:
        return b[0], jnp.where(a[0] == b[0], a[1] + b[1], b[1])

    _, sums = jax.lax.associative_scan(join, (place, values))
    numbers = jnp.arange(math.prod(shape), dtype=jnp.int32)
    last = jnp.maximum(jnp.searchsorted(place, numbers, side="right") - 1, 0)
    return jnp.where(place[last] == numbers, sums[last], 0.0).reshape(shape)
