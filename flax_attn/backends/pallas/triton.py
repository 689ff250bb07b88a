"""The body of the kernel in Pallas for Triton: an online softmax over blocks of keys.

    x  = score(scale * q.k), -inf where masked      rows cols, float32
    m' = max(m, max(x))     l' = l exp(m - m') + sum(exp(x - m'))     o' = o exp(m - m') + p.v

One program computes a block of queries of one head. It reads the blocks of keys that `ranges` names
and evaluates the mask in those that not every query sees whole. Fully masked rows give l = 0.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..._internal.types import Sizes
from .contract import Leaf, Program

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """Queries and keys of a block, and how Triton runs a program."""

    rows: int = 128
    columns: int = 64
    warps: int = 8
    stages: int = 3


class Kernel(NamedTuple):
    """What is static of a kernel: its programs, sizes, blocks and precision."""

    mask: Program
    score: Program
    keep: Program | None  # of dropout
    rate: float
    sizes: Sizes
    blocks: Blocks
    backward_blocks: Blocks
    precision: Any
    interpret: bool


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
    (B, T, N, H), (S, K, h) = qkv[0].shape, qkv[2].shape[1:]
    rows = kernel.blocks.rows
    arrays = [stored(x) for each in leaves for x in each]

    def of_head(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, S, None, width), lambda i, n, b: (b, 0, n // (N // K), 0))

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, n, b: (b, i, n, 0))

    lines = pl.BlockSpec((None, None, rows), lambda i, n, b: (b, n, i))
    whole = [pl.BlockSpec(x.shape, lambda i, n, b, x=x: (0,) * x.ndim) for x in (ranges, *arrays)]
    each = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    return pl.pallas_call(
        functools.partial(_forward_body, kernel, [*map(len, leaves)]),
        grid=(T // rows, N, B),
        in_specs=[of_rows(H), of_head(H), of_head(h), *whole],
        out_specs=[of_rows(h), lines, lines],
        out_shape=[jax.ShapeDtypeStruct((B, T, N, h), jnp.float32), each, each],
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*qkv, ranges, *arrays)


def stored(x: jax.Array) -> jax.Array:
    """An array as kernels read it: with an axis, and booleans as bytes, as which no other is."""
    kind = {"bool": jnp.int8, "int8": jnp.int32, "uint8": jnp.uint32}.get(x.dtype.name, x.dtype)
    return x.astype(kind).reshape(x.shape or (1,))


def compiler(kernel: Kernel) -> dict[str, Any]:
    """Options of Triton, whose module is imported only where it is used: newer ones warn."""
    if kernel.interpret:
        return {}
    from jax.experimental.pallas import triton

    blocks = kernel.blocks
    return {
        "compiler_params": triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)
    }


def _forward_body(
    kernel: Kernel, counts: list[int], q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any
) -> None:
    ranges_ref, *leaf_refs, o_ref, m_ref, l_ref = refs
    rows, i, b = kernel.blocks.rows, pl.program_id(0), pl.program_id(2)
    leaves = iter([leaf_of(ref) for ref in leaf_refs])
    block = _Block(
        kernel,
        [[next(leaves) for _ in range(count)] for count in counts],
        (b, pl.program_id(1), i * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)),
        q_ref[...],
        k_ref,
        v_ref,
    )
    carry = (
        jnp.full(rows, -jnp.inf, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((rows, v_ref.shape[-1]), jnp.float32),
    )
    entry = jnp.minimum(b, ranges_ref.shape[0] - 1)
    lo, seen_lo, seen_hi, hi = bounds(kernel, *(ranges_ref[entry, i, x] for x in range(4)))
    for first, end, masked in ((lo, seen_lo, True), (seen_lo, seen_hi, False), (seen_hi, hi, True)):
        carry = jax.lax.fori_loop(first, end, functools.partial(block.step, masked), carry)
    m, l, o = carry
    o_ref[...] = o / jnp.where(l == 0, 1.0, l)[:, None]
    m_ref[...], l_ref[...] = m, l


def bounds(kernel: Kernel, lo: Any, hi: Any, seen_lo: Any, seen_hi: Any) -> tuple[Any, ...]:
    """Blocks of keys: the first, the first and the last that need no mask, and the last."""
    size = kernel.blocks.columns
    lo, hi = lo // size, (hi + size - 1) // size
    seen_lo = jnp.clip((seen_lo + size - 1) // size, lo, hi)
    return lo, seen_lo, jnp.clip(seen_hi // size, seen_lo, hi), hi


class _Block(NamedTuple):
    """A block of queries inside a kernel: the arrays of its programs, its indices b, n and q."""

    kernel: Kernel
    leaves: list[list[Leaf]]
    place: tuple[Any, Any, Any]
    q: Any
    k_ref: Any
    v_ref: Any

    def step(self, masked: bool, j: Any, carry: Any) -> Any:
        """m, l and o after the block j of keys."""
        (m, l, o), (rows, columns) = carry, self.kernel.blocks[:2]
        k, v = (ref[pl.ds(j * columns, columns), :] for ref in (self.k_ref, self.v_ref))
        k_idx = j * columns + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        at, (of_mask, of_score, of_keep) = (*self.place, k_idx), self.leaves
        x = self.kernel.score(of_score, dot(self.kernel, self.q, k, 1), *at)
        x = jnp.broadcast_to(x, (rows, columns))
        if masked:
            # Keys beyond the last one stand in the last block alone, which is always masked.
            seen = self.kernel.mask(of_mask, *at) & (k_idx < self.kernel.sizes.S)
            seen = jnp.broadcast_to(seen, (rows, columns))
            x = jnp.where(seen, x, -jnp.inf)
            # A key that no query of the block sees may hold NaN, and 0 * NaN is NaN.
            keys = jnp.max(seen.astype(jnp.int32), axis=0) > 0
            v = jnp.where(keys[:, None], v, jnp.zeros_like(v))
        top = jnp.maximum(m, jnp.max(x, axis=1))
        shift = jnp.where(top == -jnp.inf, 0.0, top)
        p = jnp.exp2((x - shift[:, None]) * LOG2E)
        alpha = jnp.exp2((m - shift) * LOG2E)
        l = alpha * l + jnp.sum(p, axis=1)
        if self.kernel.keep is not None:  # of the weights, whose sum is that of all
            share = 1.0 - self.kernel.rate if self.kernel.rate < 1 else jnp.inf
            p = jnp.where(self.kernel.keep(of_keep, *at), p / share, 0.0)
        return top, l, o * alpha[:, None] + dot(self.kernel, p.astype(v.dtype), v, 0)


def dot(kernel: Kernel, a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a.b over the last axis of a and `axis` of b, summed in float32.

    The precision is said, since Triton would round float32 to TF32 by default.
    """
    axes = (((1,), (axis,)), ((), ()))
    precision = kernel.precision if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def leaf_of(ref: Any) -> Leaf:
    def load(*at: Any) -> jax.Array:
        shape = jnp.broadcast_shapes(*map(jnp.shape, at))
        value = ref[tuple(jnp.broadcast_to(jnp.asarray(x, jnp.int32), shape) for x in at)]
        return value != 0 if value.dtype == jnp.int8 else value

    return Leaf(load, ref.shape)
