"""The backward pass in Pallas for Triton: dq by rows of queries, dk and dv by columns of keys.

    p  = exp(score(scale * q.k) - m) / l       rows cols
    ds = p * (do.v - delta)                    delta = rowsum(do * o) - dlse
    dq = ds'.k      dk = ds'.q      dv = p.do      ds' = ds through the score and the scale

Both kernels compute p again, so that each writes its own part and no two write the same: nothing is
added atomically, and every run gives the same bits. The score is differentiated inside.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .contract import Kernel
from .triton import (
    LOG2E,
    Block,
    RowSpecs,
    bounds,
    compiler,
    dot,
    ends_of,
    loops,
    stored,
    whole,
    without_hidden,
)


def backward(
    kernel: Kernel,
    qkv: tuple[jax.Array, ...],
    do: jax.Array,
    lines: list[jax.Array],
    ranges: jax.Array,
    leaves: Any,
) -> tuple[jax.Array, ...]:
    """dq, dk and dv in float32, in the shapes of q, k and v.

    Args:
      kernel, qkv, ranges, leaves: as of `forward`.
      do: cotangent of the output, `B T N h`.
      lines: m, 1 / l and delta of each row, `B N T`; m is infinite for fully masked rows.
    """
    arrays, counts = stored(leaves), [*map(len, leaves)]
    dq = _by_rows(kernel, counts, (*qkv, do, *lines), [ranges, *arrays])
    columns = column_ranges(kernel, ranges, qkv[1].shape[1] // kernel.blocks.columns)
    return dq, *_by_columns(kernel, counts, (*qkv, do, *lines), [columns, *arrays])


def column_ranges(kernel: Kernel, ranges: jax.Array, count: int) -> jax.Array:
    """For each block of keys the blocks of queries that read it, and those that all see it whole.

    `B|1 count 4`, from the ranges of keys of all blocks of queries. The second pair is empty unless
    such blocks stand side by side.
    """
    ends = jnp.stack(bounds(kernel, *jnp.moveaxis(ranges, -1, 0)))[..., None]  # 4 B blocks 1
    at = jnp.arange(count, dtype=jnp.int32)[None, None]
    reads = (ends[0] <= at) & (at < ends[3])  # B blocks count
    whole = (ends[1] <= at) & (at < ends[2])
    number = jnp.arange(reads.shape[1], dtype=jnp.int32)[None, :, None]

    def span(among: jax.Array) -> tuple[jax.Array, jax.Array]:
        first = jnp.where(among, number, reads.shape[1]).min(1)
        end = jnp.where(among, number + 1, 0).max(1)
        return jnp.minimum(first, end), end

    (first, end), (whole_first, whole_end) = span(reads), span(whole)
    is_one = whole.sum(1, dtype=jnp.int32) == whole_end - whole_first
    whole_first, whole_end = (jnp.where(is_one, x, first) for x in (whole_first, whole_end))
    return jnp.stack([first, whole_first, whole_end, end], axis=-1)


def _by_rows(kernel: Kernel, counts: list[int], each: tuple, shared: list) -> jax.Array:
    (B, T, N, H), h = each[0].shape, each[2].shape[-1]
    specs = RowSpecs.of(kernel, each)
    of_each = [specs.rows(H), specs.head(H), specs.head(h), specs.rows(h), *[specs.line] * 3]
    return pl.pallas_call(
        functools.partial(_rows_body, kernel, counts),
        grid=(T // kernel.blocks.rows, N, B),
        in_specs=[*of_each, *map(whole, shared)],
        out_specs=specs.rows(H),
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), jnp.float32),
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _by_columns(kernel: Kernel, counts: list[int], each: tuple, shared: list) -> list[jax.Array]:
    (B, T, N, H), (S, K, h) = each[0].shape, each[2].shape[1:]
    columns, group = kernel.blocks.columns, N // K

    def of_group(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, T, group, width), lambda j, n, b: (b, 0, n, 0))

    def of_columns(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, columns, None, width), lambda j, n, b: (b, j, n, 0))

    line = pl.BlockSpec((None, group, T), lambda j, n, b: (b, n, 0))
    of_each = [of_group(H), of_columns(H), of_columns(h), of_group(h), *[line] * 3]
    shapes = ((B, S, K, H), (B, S, K, h))
    return pl.pallas_call(
        functools.partial(_columns_body, kernel, counts, group),
        grid=(S // columns, K, B),
        in_specs=[*of_each, *map(whole, shared)],
        out_specs=[of_columns(H), of_columns(h)],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _rows_body(kernel: Kernel, counts: list[int], *refs: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    *leaf_refs, dq_ref = refs[8:]
    block, columns = Block.of(kernel, leaf_refs, counts), kernel.blocks.columns
    i, n, b = map(pl.program_id, range(3))
    q, do, lines = q_ref[...], do_ref[...], [ref[...][:, None] for ref in line_refs]

    def step(masked: bool, j: Any, dq: Any) -> Any:
        k, v = (ref[pl.ds(j * columns, columns), :] for ref in (k_ref, v_ref))
        k, _, ds = _gradients(block, (b, n, i, j), masked, q, k, v, do, lines)
        return dq + dot(kernel, ds.astype(k.dtype), k, 0)

    ends = ends_of(ranges_ref, b, i, functools.partial(bounds, kernel))
    dq_ref[...] = loops(step, ends, jnp.zeros(q.shape, jnp.float32))


def _columns_body(kernel: Kernel, counts: list[int], group: int, *refs: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    *leaf_refs, dk_ref, dv_ref = refs[8:]
    block, rows = Block.of(kernel, leaf_refs, counts), kernel.blocks.rows
    j, head, b = map(pl.program_id, range(3))
    k, v = k_ref[...], v_ref[...]
    ends = ends_of(ranges_ref, b, j)

    def of_head(g: Any, carry: Any) -> Any:
        def step(masked: bool, i: Any, carry: Any) -> Any:
            dk, dv = carry
            of_rows = pl.ds(i * rows, rows)
            lines = [ref[g, of_rows][:, None] for ref in line_refs]
            # A query that sees nothing may hold NaN, and 0 * NaN is NaN.
            q, do = (
                jnp.where(lines[0] < jnp.inf, ref[of_rows, g, :], 0) for ref in (q_ref, do_ref)
            )
            at = (b, head * group + g, i, j)
            _, weights, ds = _gradients(block, at, masked, q, k, v, do, lines)
            dk = dk + dot(kernel, ds.astype(q.dtype).T, q, 0)
            return dk, dv + dot(kernel, weights.astype(do.dtype).T, do, 0)

        return loops(step, ends, carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk_ref[...], dv_ref[...] = jax.lax.fori_loop(0, group, of_head, start)


def _gradients(
    block: Block, at: tuple, masked: bool, q: Any, k: Any, v: Any, do: Any, lines: list[Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k without what no query sees, the weights after the dropout, and ds of the logits q.k.

    Args:
      block: the programs.
      at: batch entry, head, and the numbers of the blocks of queries and of keys.
      masked: whether the mask is evaluated.
      q, k, v, do: of the block.
      lines: m, 1 / l and delta of its rows.
    """
    kernel, index, (m, inverse, delta) = block.kernel, block.places(*at), lines
    visible = jnp.broadcast_to(m != jnp.inf, kernel.blocks[:2])
    if masked:
        visible = visible & block.mask(index)
        k, v = (without_hidden(visible, x) for x in (k, v))
    x, pull = jax.vjp(functools.partial(block.score, index), dot(kernel, q, k, 1))
    p = jnp.where(visible, jnp.exp2((x - jnp.where(visible, m, 0.0)) * LOG2E) * inverse, 0.0)
    weights, dp = block.drop(index, p, dot(kernel, do, v, 1))
    (ds,) = pull(jnp.where(visible, p * (dp - delta), 0.0))
    return k, weights, jnp.where(visible, ds, 0.0)
