"""One block of logits: where it stands, who may look, what the score and the dropout do there.

Arrays that broadcast to B N T S are cut by slices, never gathered, and their gradients are added
slice by slice.
"""

from collections.abc import Callable
from functools import singledispatch
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...dropout import Drop, DropoutMask
from ...masks import And, Dense, Mask, Not, Or
from ...masks.at_positions import AtPositions
from ...places import Positions
from ...scores import Additive, Chain, Score
from ...scores import AtPositions as ScoreAtPositions


class Block(NamedTuple):
    """G heads from `n`, `rows` queries from `q`, `cols` keys from `k` of batch entry `b`.

    The starts may be traced. Of the keys only those from `fresh` on count: the last block of a
    length that is no multiple of the block reaches back into the one before.
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
        """The same, with the positions of queries and keys in place of their slots."""
        b, n, _, _ = self.indices()
        return b, n, *(self.take_block(x) for x in positions.grid)

    def corner(self, array: jax.Array) -> tuple[list[Any], list[int]]:
        """Where the block's part of an array `B|1 N|1 T|1 S|1` starts, and its size there."""
        starts, counts = (self.b, self.n, self.q, self.k), (1, self.G, self.rows, self.cols)
        axes = list(zip(array.shape, starts, counts, strict=True))
        first = [jnp.asarray(0 if n == 1 else s, jnp.int32) for n, s, _ in axes]
        return first, [1 if n == 1 else c for n, _, c in axes]

    def take_block(self, array: jax.Array) -> jax.Array:
        """The block's part of an array `B|1 N|1 T|1 S|1`."""
        starts, counts = self.corner(array)
        return jax.lax.dynamic_slice(array, starts, counts)[0]


@singledispatch
def visible(mask: Mask, at: Block) -> Any:
    """Which queries of the block may look at which of its keys; broadcasts to G rows cols."""
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
    """`visible`, with keys that an earlier block has had left out."""
    shown = jnp.asarray(visible(mask, at))
    if at.fresh is not None:
        shown = shown & (at.indices()[3] >= at.fresh)
    return jnp.broadcast_to(shown, (at.G, at.rows, at.cols))


def zero_masked_keys(x: Float[Array, "cols H"], shown: jax.Array) -> Float[Array, "cols H"]:
    """Zeros in place of keys that nobody in the block sees: NaN times no weight is NaN."""
    rows = shown.reshape(-1, shown.shape[2]).astype(jnp.float32)
    visible = jnp.ones((1, rows.shape[0]), jnp.float32) @ rows  # a product is quicker than `any`
    return jnp.where(visible.reshape(-1, 1) > 0, x, 0)


def dropout_keep(dropout: Drop, at: Block) -> Bool[Array, "G rows cols"]:
    """Which of the block's elements survive the dropout."""
    keep = (
        at.take_block(dropout.mask)
        if isinstance(dropout, DropoutMask)
        else dropout.keep(*at.indices())
    )
    return jnp.broadcast_to(keep, (at.G, at.rows, at.cols))


class Local(NamedTuple):
    """Stands where an additive score stood: the block's part of its array."""

    array: jax.Array


@singledispatch
def local(score: Any, at: Block) -> Any:
    """The score's arrays as far as this block needs them."""
    return score


@local.register
def _(score: Chain, at: Block):
    return local(score.first, at), local(score.then, at)


@local.register
def _(score: Additive, at: Block):
    return Local(at.take_block(score.array))


def modify_logits(
    score: Any, logits: Float[Array, "G rows cols"], at: Block
) -> Float[Array, "G rows cols"]:
    """The logits changed by a `local` score."""
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
    """A score's floating leaves, and what puts such leaves back."""
    leaves, structure = jax.tree.flatten(score)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def unflatten(floats: list[jax.Array]) -> Any:
        replaced = dict(zip(places, floats, strict=True))
        return structure.unflatten([replaced.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], unflatten


@singledispatch
def is_per_block(score: Any) -> list[bool]:
    """For each floating leaf, whether `local` cuts it."""
    return [False] * len(leaves_of(score)[0])


@is_per_block.register
def _(score: Chain):
    return is_per_block(score.first) + is_per_block(score.then)


@is_per_block.register
def _(score: Additive):
    return [True]


def add(total: jax.Array, part: jax.Array, per_block: bool, at: Block) -> jax.Array:
    """The gradient of one leaf, with this block's part added."""
    part = part.astype(total.dtype)
    if not per_block:
        return total + part
    starts, counts = at.corner(total)
    part = part[None] + jax.lax.dynamic_slice(total, starts, counts)
    return jax.lax.dynamic_update_slice(total, part, starts)
