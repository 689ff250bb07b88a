"""Iteration over heads, query blocks and key blocks: unrolled, or as loops."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._internal.arrays import bounded_loop, maximum, minimum
from ...masks import Mask, Rows
from ...masks.ranges import fully_visible_range, visible_range
from . import lanes
from .block import Block
from .plan import BlockPlan, static_fully_visible_range, static_visible_range

# Edges of blocks without a mask are multiples of this: matrix products are faster then.
BLOCK_ALIGNMENT = 64


Step = Callable[[Any, Block, bool], Any]


class Heads(NamedTuple):
    """G heads from `n` of batch entry `b` of an array B T N H or B N T, sliced on access."""

    array: jax.Array
    b: Any
    n: Any
    G: int

    def rows(self, at: Block) -> jax.Array:
        """The block's queries: R H, or R, where R is G heads times its rows."""
        if self.array.ndim == 3:
            return self._take_block(self.n, at.q, self.G, at.rows).reshape(-1)
        x = self._take_block(at.q, self.n, at.rows, self.G)
        return jnp.swapaxes(x, 0, 1).reshape(-1, x.shape[-1])

    def cols(self, at: Block) -> jax.Array:
        """The block's keys, cols H, of one head."""
        return self._take_block(at.k, self.n, at.cols, 1)[:, 0]

    def _take_block(self, second: Any, third: Any, *counts: int) -> jax.Array:
        rest = self.array.shape[3:]
        starts = [jnp.int32(x) for x in (self.b, second, third, *(0 for _ in rest))]
        sizes = 1, *counts, *rest
        return jax.lax.dynamic_slice(self.array, starts, sizes, allow_negative_indices=False)[0]


def join(x: Float[Array, "U G T H"], B: int) -> Float[Array, "B T N H"]:
    """Inverse of the split by key heads."""
    _, _, T, H = x.shape
    return jnp.moveaxis(x.reshape(B, -1, T, H), 1, 2)


def scan_heads(plan: BlockPlan, batched: bool, step: Callable, carry: Any, heads: tuple) -> Any:
    """Scans `carry, ys = step(carry, heads, block)` over all key heads; `ys` are stacked, U ...

    A step gets the part of each array of `heads`, B T N H or B N T, that belongs to one key head,
    as `Heads`. With several loops, or `batched`, each starts from the carry, which must be zeros,
    and the carries are summed.
    """
    groups = plan.sizes.N // plan.groups
    count = plan.sizes.B * groups
    shared = [x.shape[x.ndim // 2] // groups for x in heads]
    at = Block(0, 0, 0, 0, plan.groups, plan.rows, plan.cols)

    def one(carry: Any, u: jax.Array) -> tuple[Any, Any]:
        # div and rem: // and % would add corrections for negative numbers.
        b, j = jax.lax.div(u, jnp.int32(groups)), jax.lax.rem(u, jnp.int32(groups))
        mine = [Heads(x, b, j * G, G) for x, G in zip(heads, shared, strict=True)]
        return step(carry, mine, at._replace(b=b, n=j * plan.groups))

    if plan.lanes > 1:
        return lanes.scan(one, carry, count, plan.lanes)
    if not batched:
        return jax.lax.scan(one, carry, jnp.arange(count, dtype=jnp.int32))

    # Under vmap the heads are split beforehand: a slice at a batched index would be a gather.
    def alone(u: jax.Array, mine: list) -> tuple[Any, Any]:
        mine = [Heads(x, 0, 0, G) for x, G in zip(mine, shared, strict=True)]
        return step(carry, mine, at._replace(b=u // groups, n=u % groups * plan.groups))

    carries, ys = jax.vmap(alone)(
        jnp.arange(count, dtype=jnp.int32), [_split_heads(x, groups) for x in heads]
    )
    return jax.tree.map(lambda x: x.sum(axis=0), carries), ys


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """B T N H to U 1 T G H, or B N T to U 1 G T: batch entries and key heads merged into U."""
    axis = x.ndim // 2
    x = x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, 1, *x.shape[2:])


def scan_key_blocks(plan: BlockPlan, mask: Mask, at: Block, step: Step, carry: Any) -> Any:
    """Runs `carry = step(carry, block, masked)` over the key blocks visible to `at`'s queries."""
    rows = Rows(at.q, at.rows, plan.sizes.T)
    # Unrolled blocks need static bounds; masks with arrays then count as visible everywhere, and
    # the step's own mask hides the rest.
    if plan.unrolled:
        ranges = (
            *static_visible_range(mask, rows, plan.sizes),
            *static_fully_visible_range(mask, rows, plan.sizes),
        )
        for k, cols, masked in _masked_pieces(plan.cols, *ranges):
            carry = step(carry, at._replace(k=k, cols=cols), masked)
        return carry
    ranges = (
        *visible_range(mask, at.b, rows, plan.sizes),
        *fully_visible_range(mask, at.b, rows, plan.sizes),
    )
    # One block holds all that these queries see; near the end it is moved back to fit.
    if plan.band is not None:
        k = jnp.minimum(jnp.asarray(ranges[0], jnp.int32), plan.sizes.S - plan.band)
        return step(carry, at._replace(k=k, cols=plan.band), True)
    return _loop_blocks(plan, ranges, at, step, carry)


def _masked_pieces(
    cols: int, lo: int, hi: int, first: int, last: int
) -> list[tuple[int, int, bool]]:
    """`(start, count, masked)` of blocks in [lo, hi); [first, last) is visible to all queries."""
    first, last = min(max(first, lo), hi), min(last, hi)
    if hi - lo <= cols:
        return [(lo, hi - lo, not (first == lo and last == hi))] if hi > lo else []
    # Unmasked pieces begin and end at aligned keys; the masked pieces on either side grow.
    if first > lo:
        first = min(-(-first // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT, hi)
    if last < hi:
        last = max(last // BLOCK_ALIGNMENT * BLOCK_ALIGNMENT, lo)
    ends = [
        (lo, first, True),
        (first, max(last, first), False),
        (max(last, first), hi, True),
    ]
    pieces = []
    for start, stop, masked in ends:
        pieces += [(k, min(cols, stop - k), masked) for k in range(start, stop, cols)]
    return pieces


def _loop_blocks(plan: BlockPlan, ranges: tuple, at: Block, step: Step, carry: Any) -> Any:
    cols, S = plan.cols, plan.sizes.S
    # Three loops: blocks that need a mask, blocks that every query sees, and masked ones again.
    lo, hi, inner_lo, inner_hi = ranges
    first, last = lo // cols, (hi + cols - 1) // cols
    inner_lo, inner_hi = (inner_lo + cols - 1) // cols, inner_hi // cols
    no_edge = isinstance(inner_lo, int) and isinstance(first, int) and inner_lo <= first
    inner_lo = minimum(maximum(inner_lo, first), last)
    inner_hi = minimum(maximum(inner_hi, inner_lo), last)
    if no_edge:
        first = inner_lo  # statically empty: no loop is compiled for it

    def body(masked):
        def run(j, carry):
            # The last block overlaps the one before it, whose keys `fresh` leaves out.
            k = jnp.minimum(j * cols, S - cols)
            fresh = j * cols if masked and S % cols else None
            return step(carry, at._replace(k=k, cols=cols, fresh=fresh), masked)

        return run

    for a, b, masked in (
        (first, inner_lo, True),
        (inner_lo, inner_hi, False),
        (inner_hi, last, True),
    ):
        if a is not b and not (isinstance(a, int) and isinstance(b, int) and a >= b):
            carry = bounded_loop(a, b, -(-S // cols), body(masked), carry)
    return carry


def scan_query_blocks(plan: BlockPlan, at: Block, step: Callable, carry: Any) -> tuple[Any, Any]:
    """Scans `carry, ys = step(carry, block, new)` over query blocks; `ys`, G rows ..., are joined.

    Rows of a block before `new` were processed in an earlier block.
    """
    T, rows = plan.sizes.T, plan.rows
    if plan.unrolled:
        outputs = []
        for q in range(0, T, rows):
            carry, y = step(carry, at._replace(q=q, rows=min(rows, T - q)), None)
            outputs.append(y)
        return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outputs)

    def run(carry, i):
        q = jnp.minimum(i * rows, T - rows)
        return step(carry, at._replace(q=q, rows=rows), i * rows if T % rows else None)

    count = -(-T // rows)
    carry, ys = jax.lax.scan(run, carry, jnp.arange(count, dtype=jnp.int32))
    return carry, jax.tree.map(lambda y: join_blocks(y, T), ys)


def join_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """Blocks C G rows ... to G length ...; the last block overlaps the one before it."""
    count, G, rows = blocks.shape[:3]
    whole = jnp.moveaxis(blocks[:-1], 0, 1).reshape(G, (count - 1) * rows, *blocks.shape[3:])
    return jnp.concatenate([whole, blocks[-1][:, count * rows - length :]], axis=1)
