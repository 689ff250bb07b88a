"""The ways through the keys and the queries: written out block by block, or loops."""

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
from .plan import Plan, static_fully_visible_range, static_visible_range

BLOCK_ALIGNMENT = 64  # the edges of blocks without a mask, for the sake of the products


Step = Callable[[Any, Block, bool], Any]


class Heads(NamedTuple):
    """Of an array, B T N H or B N T, the G heads from `n` of a batch entry, cut where they lie."""

    array: jax.Array
    b: Any
    n: Any
    G: int

    def rows(self, at: Block) -> jax.Array:
        """What belongs to the block's queries: R H, or R, of G heads times its rows."""
        if self.array.ndim == 3:
            return self._take_block(self.n, at.q, self.G, at.rows).reshape(-1)
        x = self._take_block(at.q, self.n, at.rows, self.G)
        return jnp.swapaxes(x, 0, 1).reshape(-1, x.shape[-1])

    def cols(self, at: Block) -> jax.Array:
        """What belongs to the block's keys, cols H, of one head."""
        return self._take_block(at.k, self.n, at.cols, 1)[:, 0]

    def _take_block(self, second: Any, third: Any, *counts: int) -> jax.Array:
        rest = self.array.shape[3:]
        starts = [jnp.int32(x) for x in (self.b, second, third, *(0 for _ in rest))]
        sizes = 1, *counts, *rest
        return jax.lax.dynamic_slice(self.array, starts, sizes, allow_negative_indices=False)[0]


def join(x: Float[Array, "U G T H"], B: int) -> Float[Array, "B T N H"]:
    """The way back."""
    _, _, T, H = x.shape
    return jnp.moveaxis(x.reshape(B, -1, T, H), 1, 2)


def scan_heads(plan: Plan, batched: bool, step: Callable, carry: Any, heads: tuple) -> Any:
    """`carry, ys = step(carry, heads, block)` for every key head; `ys` are U ..., put together.

    Of `heads`, B T N H or B N T, a step is given those of one key head as `Heads`. Of several loops
    and of `batched` heads each starts from the carry, which is zeros, and the sum is given.
    """
    groups = plan.sizes.N // plan.groups
    count = plan.sizes.B * groups
    shared = [x.shape[x.ndim // 2] // groups for x in heads]
    at = Block(0, 0, 0, 0, plan.groups, plan.rows, plan.cols)

    def one(carry: Any, u: jax.Array) -> tuple[Any, Any]:
        b, j = jax.lax.div(u, jnp.int32(groups)), jax.lax.rem(u, jnp.int32(groups))
        mine = [Heads(x, b, j * G, G) for x, G in zip(heads, shared, strict=True)]
        return step(carry, mine, at._replace(b=b, n=j * plan.groups))

    if plan.lanes > 1:
        return lanes.scan(one, carry, count, plan.lanes)
    if not batched:
        return jax.lax.scan(one, carry, jnp.arange(count, dtype=jnp.int32))

    def alone(u: jax.Array, mine: list) -> tuple[Any, Any]:
        mine = [Heads(x, 0, 0, G) for x, G in zip(mine, shared, strict=True)]
        return step(carry, mine, at._replace(b=u // groups, n=u % groups * plan.groups))

    carries, ys = jax.vmap(alone)(
        jnp.arange(count, dtype=jnp.int32), [_split_heads(x, groups) for x in heads]
    )
    return jax.tree.map(lambda x: x.sum(axis=0), carries), ys


def _split_heads(x: jax.Array, groups: int) -> jax.Array:
    """B T N H as U 1 T G H, or B N T as U 1 G T: batch entries and key heads as one axis."""
    axis = x.ndim // 2
    x = x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])
    x = jnp.moveaxis(x, axis, 1)
    return x.reshape(-1, 1, *x.shape[2:])


def scan_key_blocks(plan: Plan, mask: Mask, at: Block, step: Step, carry: Any) -> Any:
    """`carry = step(carry, block, masked)` for all key blocks that the queries of `at` may see."""
    rows = Rows(at.q, at.rows, plan.sizes.T)
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
    if plan.band is not None:
        k = jnp.minimum(jnp.asarray(ranges[0], jnp.int32), plan.sizes.S - plan.band)
        return step(carry, at._replace(k=k, cols=plan.band), True)
    return _loop_blocks(plan, ranges, at, step, carry)


def _masked_pieces(
    cols: int, lo: int, hi: int, first: int, last: int
) -> list[tuple[int, int, bool]]:
    """`(start, count, masked)` of the blocks from `lo` to `hi`; all see from `first` to `last`."""
    first, last = min(max(first, lo), hi), min(last, hi)
    if hi - lo <= cols:
        return [(lo, hi - lo, not (first == lo and last == hi))] if hi > lo else []
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


def _loop_blocks(plan: Plan, ranges: tuple, at: Block, step: Step, carry: Any) -> Any:
    cols, S = plan.cols, plan.sizes.S
    lo, hi, inner_lo, inner_hi = ranges
    first, last = lo // cols, (hi + cols - 1) // cols
    inner_lo, inner_hi = (inner_lo + cols - 1) // cols, inner_hi // cols
    no_edge = isinstance(inner_lo, int) and isinstance(first, int) and inner_lo <= first
    inner_lo = minimum(maximum(inner_lo, first), last)
    inner_hi = minimum(maximum(inner_hi, inner_lo), last)
    if no_edge:
        first = inner_lo  # so that no loop is compiled for what is known to be empty

    def body(masked):
        def run(j, carry):
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


def scan_query_blocks(plan: Plan, at: Block, step: Callable, carry: Any) -> tuple[Any, Any]:
    """`carry, ys = step(carry, block, new)` for all query blocks; `ys`, G rows ..., put together.

    Of a block's rows those from `new` on have not been in an earlier one.
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
    return carry, jax.tree.map(lambda y: _join_blocks(y, T), ys)


def _join_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """Blocks, C G rows ..., as G length ...; the last one reaches back into the one before."""
    count, G, rows = blocks.shape[:3]
    whole = jnp.moveaxis(blocks[:-1], 0, 1).reshape(G, (count - 1) * rows, *blocks.shape[3:])
    return jnp.concatenate([whole, blocks[-1][:, count * rows - length :]], axis=1)
