"""The forward pass in Pallas for Triton: an online softmax over blocks of keys.

    x  = score(scale * q.k), -inf where masked      rows cols, float32
    m' = max(m, max(x))     l' = l exp(m - m') + sum(exp(x - m'))     o' = o exp(m - m') + p.v

One program computes a block of queries of one head. It reads the blocks of keys that `ranges` names
and evaluates the mask in those that not every query sees whole. Fully masked rows give l = 0.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .contract import Kernel, Leaf

LOG2E = math.log2(math.e)
Ends = tuple[Any, Any, Any, Any]


def forward(
    kernel: Kernel, qkv: tuple[jax.Array, ...], ranges: jax.Array, leaves: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o in float32, `B T N h`, and m and l, `B N T`.

    Args:
      kernel: what is static.
      qkv: `B T N H`, `B S K H` and `B S K h`; lengths are multiples of the blocks, widths powers
        of two.
      ranges: of `contract.block_ranges`.
      leaves: the arrays of the programs of the mask, the score and the dropout.
    """
    (B, T, N, H), h = qkv[0].shape, qkv[2].shape[-1]
    specs, shared = RowSpecs.of(kernel, qkv), [ranges, *stored(leaves)]
    each = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    return pl.pallas_call(
        functools.partial(_body, kernel, [*map(len, leaves)]),
        grid=(T // kernel.blocks.rows, N, B),
        in_specs=[specs.rows(H), specs.head(H), specs.head(h), *map(whole, shared)],
        out_specs=[specs.rows(h), specs.line, specs.line],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, h), jnp.float32), each, each],
        name="attend_forward",
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*qkv, *shared)


def _body(kernel: Kernel, counts: list[int], q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any):
    ranges_ref, *leaf_refs, o_ref, m_ref, l_ref = refs
    block, columns = Block.of(kernel, leaf_refs, counts), kernel.blocks.columns
    i, n, b = map(pl.program_id, range(3))
    q = q_ref[...]

    def step(masked: bool, j: Any, carry: Any) -> Any:
        m, l, o = carry
        k, v = (ref[pl.ds(j * columns, columns), :] for ref in (k_ref, v_ref))
        index = block.places(b, n, i, j)
        x = block.score(index, logits_of(kernel, q, k))
        if masked:
            visible = block.mask(index)
            x, v = jnp.where(visible, x, -jnp.inf), without_hidden(visible, v)
        top = jnp.maximum(m, jnp.max(x, axis=1))
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        p = jnp.exp2((x - shift[:, None]) * LOG2E)
        alpha = jnp.exp2((m - shift) * LOG2E)
        (weights,) = block.drop(index, p)  # l is the sum of all weights
        narrow = weights.astype(v.dtype)
        o = o * alpha[:, None] + dot(kernel, narrow, v, 0)
        if kernel.adds_remainder:
            o = o + dot(kernel, (weights - narrow.astype(jnp.float32)).astype(v.dtype), v, 0)
        return top, alpha * l + jnp.sum(p, axis=1), o

    zeros = jnp.zeros((kernel.blocks.rows, v_ref.shape[-1]), jnp.float32)
    start = (jnp.full(len(zeros), -jnp.inf, jnp.float32), jnp.zeros(len(zeros), jnp.float32), zeros)
    m, l, o = loops(step, ends_of(ranges_ref, b, i, functools.partial(bounds, kernel)), start)
    o_ref[...] = o / jnp.where(l == 0, 1.0, l)[:, None]
    m_ref[...], l_ref[...] = m, l


# What the kernels of both passes share: how they are called.


class RowSpecs(NamedTuple):
    """Parts of the arrays that a program of one block of queries and one head reads."""

    length: int
    group: int
    block: int

    @classmethod
    def of(cls, kernel: Kernel, qkv: Sequence[jax.Array]) -> "RowSpecs":
        q, k = qkv[:2]
        return cls(k.shape[1], q.shape[2] // k.shape[2], kernel.blocks.rows)

    def head(self, width: int) -> pl.BlockSpec:
        """All keys or values of its head."""
        shape, group = (None, self.length, None, width), self.group
        return pl.BlockSpec(shape, lambda i, n, b: (b, 0, n // group, 0))

    def rows(self, width: int) -> pl.BlockSpec:
        """Its block of queries, or of what is as long."""
        return pl.BlockSpec((None, self.block, None, width), lambda i, n, b: (b, i, n, 0))

    @property
    def line(self) -> pl.BlockSpec:
        """One number for each of its queries."""
        return pl.BlockSpec((None, None, self.block), lambda i, n, b: (b, n, i))


def whole(x: jax.Array) -> pl.BlockSpec:
    """An array that every program reads by index."""
    return pl.BlockSpec(x.shape, lambda *program: (0,) * x.ndim)


def stored(leaves: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """Arrays as kernels read them: with an axis, and booleans as bytes, as which no other is."""
    wider = {"bool": jnp.int8, "int8": jnp.int32, "uint8": jnp.uint32}
    arrays = [x for each in leaves for x in each]
    return [x.astype(wider.get(x.dtype.name, x.dtype)).reshape(x.shape or (1,)) for x in arrays]


def compiler(kernel: Kernel) -> dict[str, Any]:
    """Options of Triton, whose module is imported only where it is used: newer ones warn."""
    if kernel.interpret:
        return {}
    from jax.experimental.pallas import triton

    blocks = kernel.blocks
    return {
        "compiler_params": triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)
    }


# What they share inside.


class Block(NamedTuple):
    """The programs of a kernel with the arrays that they read."""

    kernel: Kernel
    leaves: list[list[Leaf]]

    @classmethod
    def of(cls, kernel: Kernel, refs: Sequence[Any], counts: list[int]) -> "Block":
        leaves = iter([_leaf(ref) for ref in refs])
        return cls(kernel, [[next(leaves) for _ in range(count)] for count in counts])

    def places(self, b: Any, n: Any, i: Any, j: Any, q_axis: int = 0) -> tuple[Any, ...]:
        """b, n, and the queries and keys of the blocks i and j, each along its axis of a block."""
        rows, columns = self.kernel.blocks[:2]
        return b, n, i * rows + _along(q_axis, rows), j * columns + _along(1 - q_axis, columns)

    def score(self, index: tuple[Any, ...], logits: jax.Array) -> jax.Array:
        """Logits, scaled and changed by the score."""
        return jnp.broadcast_to(self.kernel.score(self.leaves[1], logits, *index), logits.shape)

    def mask(self, index: tuple[Any, ...]) -> jax.Array:
        """Which key each query sees; none beyond the last query or key.

        Keys beyond the last one stand in the last block alone, which always asks.
        """
        (_, _, q, k), sizes = index, self.kernel.sizes
        visible = self.kernel.mask(self.leaves[0], *index) & (q < sizes.T) & (k < sizes.S)
        return jnp.broadcast_to(visible, jnp.broadcast_shapes(q.shape, k.shape))

    def drop(self, index: tuple[Any, ...], *weights: jax.Array) -> Sequence[jax.Array]:
        """Weights, or what is multiplied by them, after the dropout."""
        if self.kernel.keep is None:
            return weights
        rest = 1.0 - self.kernel.rate if self.kernel.rate < 1 else jnp.inf
        keep = self.kernel.keep(self.leaves[2], *index)
        return [jnp.where(keep, x / rest, 0.0) for x in weights]


def _along(axis: int, length: int) -> jax.Array:
    shape = (length, 1) if axis == 0 else (1, length)
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def without_hidden(visible: jax.Array, x: jax.Array) -> jax.Array:
    """Keys or values with zeros where no query of the block sees them.

    They may hold NaN there, and 0 * NaN is NaN.
    """
    keys = jnp.max(visible.astype(jnp.int32), axis=0) > 0
    return jnp.where(keys[:, None], x, jnp.zeros_like(x))


def bounds(kernel: Kernel, lo: Any, hi: Any, whole_lo: Any, whole_hi: Any) -> Ends:
    """Blocks of keys: the first, the first and the last that need no mask, and the last."""
    size = kernel.blocks.columns
    lo, hi = lo // size, (hi + size - 1) // size
    whole_lo = jnp.clip((whole_lo + size - 1) // size, lo, hi)
    return lo, whole_lo, jnp.clip(whole_hi // size, whole_lo, hi), hi


def ends_of(ref: Any, b: Any, block: Any, of: Callable[..., Ends] = lambda *ends: ends) -> Ends:
    """The ends of the loops of a block, from the four numbers that are stored for it."""
    entry = jnp.minimum(b, ref.shape[0] - 1)
    return of(*(ref[entry, block, x] for x in range(4)))


def loops(step: Callable[..., Any], ends: Ends, carry: Any) -> Any:
    """Runs blocks that need a mask, those that need none, and again those that do."""
    for first, end, masked in zip(ends[:3], ends[1:], (True, False, True), strict=True):
        carry = jax.lax.fori_loop(first, end, functools.partial(step, masked), carry)
    return carry


def dot(kernel: Kernel, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a.b over the last axis of a and `axis` of b, summed in float32.

    The precision is said, since Triton would round float32 to TF32 by default.
    """
    axes = (((1,), (axis,)), ((), ()))
    precision = kernel.precision if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def logits_of(kernel: Kernel, a: jax.Array, b: jax.Array) -> jax.Array:
    """a.b over the widths, rounded alike in every kernel, whatever the shapes and their order.

    The backward pass subtracts a maximum of logits that the forward pass computed: were they
    rounded otherwise, gradients would lose a digit where logits are large. A CPU rounds products by
    their shapes, so what is interpreted sums in the order of the width, as Triton does in float32.
    """
    if not kernel.interpret:
        return dot(kernel, a, b, 1)

    def add(i: Any, total: jax.Array) -> jax.Array:
        left, right = (jax.lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in (a, b))
        return total + left.astype(jnp.float32)[:, None] * right.astype(jnp.float32)[None]

    return jax.lax.fori_loop(0, a.shape[1], add, jnp.zeros((len(a), len(b)), jnp.float32))


def _leaf(ref: Any) -> Leaf:
    def load(*at: Any) -> jax.Array:
        shape = jnp.broadcast_shapes(*map(jnp.shape, at))
        value = ref[tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in at)]
        return value != 0 if value.dtype == jnp.int8 else value

    return Leaf(load, ref.shape)
