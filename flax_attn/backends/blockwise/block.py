"""One block of logits: its indices, its attention mask, its score and its dropout mask.

Arrays that broadcast to B N T S are read by slices, never gathered, and their gradients are
accumulated slice by slice.
"""

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ... import taps
from ..._internal.types import Sizes
from ...dropout import Drop, DropoutMask
from ...masks import And, Dense, Mask, Not, Or
from ...masks.at_positions import AtPositions
from ...places import Positions
from ...reference import zero_nonfinite_where_masked
from ...scores import Additive, Chain, Score
from ...scores import AtPositions as ScoreAtPositions


class Block(NamedTuple):
    """G heads from `n`, `rows` queries from `q`, `cols` keys from `k` of batch entry `b`.

    The starts may be traced. Only keys from `fresh` on count: the last block of a length that is
    not a multiple of the block size overlaps the block before it.
    """

    b: Any
    n: Any
    q: Any
    k: Any
    G: int
    rows: int
    cols: int
    fresh: Any = None

    def indices(self) -> tuple[Any, ...]:
        """Index arrays b, n, q, k that broadcast to G rows cols."""
        counts, starts = (1, self.G, self.rows, self.cols), (self.b, self.n, self.q, self.k)
        shapes = ((1, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 1, -1))
        return tuple(
            (jnp.arange(count, dtype=jnp.int32) + jnp.asarray(start, jnp.int32)).reshape(shape)
            for count, start, shape in zip(counts, starts, shapes, strict=True)
        )

    def indices_at_positions(self, positions: Positions) -> tuple[Any, ...]:
        """The same with positions of queries and keys instead of slots."""
        b, n, _, _ = self.indices()
        return b, n, *(self.take_block(x) for x in positions.grid)

    def corner(self, array: jax.Array) -> tuple[list[Any], list[int]]:
        """Start and size of the block within an array `B|1 N|1 T|1 S|1`."""
        starts, counts = (self.b, self.n, self.q, self.k), (1, self.G, self.rows, self.cols)
        # An axis of length one is shared by all blocks, so it is never offset.
        axes = list(zip(array.shape, starts, counts, strict=True))
        first = [jnp.asarray(0 if n == 1 else s, jnp.int32) for n, s, _ in axes]
        return first, [1 if n == 1 else c for n, _, c in axes]

    def take_block(self, array: jax.Array) -> jax.Array:
        """The block's part of an array `B|1 N|1 T|1 S|1`."""
        starts, counts = self.corner(array)
        return jax.lax.dynamic_slice(array, starts, counts)[0]


@singledispatch
def visible(mask: Mask, at: Block) -> Any:
    """Attention mask of the block; broadcasts to G rows cols."""
    return mask(*at.indices())


@visible.register
def _(mask: Dense, at: Block):
    return at.take_block(mask.array)


@visible.register
def _(mask: AtPositions, at: Block):
    return mask.evaluate(*at.indices_at_positions(mask.positions))


@visible.register
def _(mask: And, at: Block):
    return visible(mask.a, at) & visible(mask.b, at)


@visible.register
def _(mask: Or, at: Block):
    return visible(mask.a, at) | visible(mask.b, at)


@visible.register
def _(mask: Not, at: Block):
    return ~visible(mask.a, at)


def visible_once(mask: Mask, at: Block) -> Bool[Array, "G rows cols"]:
    """`visible` without the keys that an earlier block has processed."""
    shown = jnp.asarray(visible(mask, at))
    if at.fresh is not None:
        shown = shown & (at.indices()[3] >= at.fresh)
    return jnp.broadcast_to(shown, (at.G, at.rows, at.cols))


def zero_masked_keys(x: Float[Array, "cols H"], shown: jax.Array) -> Float[Array, "cols H"]:
    """Zeros for keys that no query of the block sees: a weight of 0 times NaN would be NaN."""
    rows = shown.reshape(-1, shown.shape[2]).astype(jnp.float32)
    # A product with ones is faster here than `any` over the queries.
    visible = jnp.ones((1, rows.shape[0]), jnp.float32) @ rows
    return jnp.where(visible.reshape(-1, 1) > 0, x, 0)


def dropout_keep(dropout: Drop, at: Block) -> Bool[Array, "G rows cols"]:
    """Dropout mask of the block: True where a weight is kept."""
    keep = (
        at.take_block(dropout.mask)
        if isinstance(dropout, DropoutMask)
        else dropout.keep(*at.indices())
    )
    return jnp.broadcast_to(keep, (at.G, at.rows, at.cols))


def record_dropout(dropout: Drop, sizes: Sizes) -> Drop:
    """The same dropout, or the mask that a listener puts in its place.

    Only inside `listen` the whole mask is made; otherwise each block draws its own part of it.
    """
    if not taps.listening():
        return dropout
    keep = jnp.broadcast_to(dropout.grid(sizes), sizes.shape)
    keep_tapped = taps.tap("keep", keep)
    return dropout if keep_tapped is keep else DropoutMask(keep_tapped, dropout.rate)


class Local(NamedTuple):
    """Replaces an `Additive` score: the block's part of its array."""

    array: jax.Array


@singledispatch
def local(score: Any, at: Block) -> Any:
    """The score with its arrays sliced to this block."""
    return score


@local.register
def _(score: Chain, at: Block):
    return local(score.first, at), local(score.then, at)


@local.register
def _(score: Additive, at: Block):
    return Local(at.take_block(score.array))


@local.register
def _(score: Local, at: Block):
    """Keys of a part that was cut for all keys of its queries."""
    array = score.array
    if array.shape[2] == 1:
        return score
    return Local(jax.lax.dynamic_slice_in_dim(array, at.k, at.cols, axis=2))


@local.register
def _(score: tuple, at: Block):
    return tuple(local(part, at) for part in score)


def finite_where_hidden(score: Any, shown: jax.Array) -> Any:
    """A score that `local` returned, with zeros for NaN and Inf of its arrays at hidden places."""
    if isinstance(score, Local):
        return Local(zero_nonfinite_where_masked(shown, score.array))
    if isinstance(score, Score):
        return score
    return tuple(finite_where_hidden(part, shown) for part in score)


def modify_logits(
    score: Any, logits: Float[Array, "G rows cols"], at: Block
) -> Float[Array, "G rows cols"]:
    """Logits after a score that `local` returned."""
    if isinstance(score, Local):
        return logits + score.array.astype(logits.dtype)
    if isinstance(score, ScoreAtPositions):
        return score.evaluate(logits, *at.indices_at_positions(score.positions))
    if isinstance(score, Score):
        return score(logits, *at.indices())
    for part in score:
        logits = modify_logits(part, logits, at)
    return logits


def leaves_of(score: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """A score's floating leaves, and the function that rebuilds the score from such leaves."""
    leaves, structure = jax.tree.flatten(score)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def unflatten(floats: list[jax.Array]) -> Any:
        replaced = dict(zip(places, floats, strict=True))
        return structure.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], unflatten


@singledispatch
def is_per_block(score: Any) -> list[bool]:
    """For each floating leaf, whether `local` slices it."""
    return [False] * len(leaves_of(score)[0])


@is_per_block.register
def _(score: Chain):
    return is_per_block(score.first) + is_per_block(score.then)


@is_per_block.register
def _(score: Additive):
    return [True]


def add(total: jax.Array, part: jax.Array, per_block: bool, at: Block) -> jax.Array:
    """The gradient of one leaf plus this block's contribution."""
    part = part.astype(total.dtype)
    if not per_block:
        return total + part
    # Blocks that share an axis of length one add to the same slice.
    starts, counts = at.corner(total)
    part = part[None] + jax.lax.dynamic_slice(total, starts, counts)
    return jax.lax.dynamic_update_slice(total, part, starts)
