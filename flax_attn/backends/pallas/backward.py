"""The backward pass in Pallas for Triton: dq by rows of queries, dk and dv by columns of keys.

    p  = exp(score(scale * q.k) - m) / l       rows cols
    ds = p * (do.v - delta)                    delta = rowsum(do * o) - dlse
    dq = ds'.k      dk = ds'.q      dv = p.do      ds' = ds through the score and the scale

Both kernels compute p again, so that each writes its own part and no two write the same: nothing is
added atomically, and every run gives the same bits. The score is differentiated inside, by what it
reads of arrays too (`arrays.py`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .arrays import Read, differentiated
from .contract import Kernel
from .triton import (
    LOG2E,
    Block,
    RowSpecs,
    bounds,
    compiler,
    dot,
    ends_of,
    logits_of,
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
    reads: Sequence[Read],
) -> tuple[tuple[jax.Array, ...], list[jax.Array]]:
    """dq, dk and dv in float32, in the shapes of q, k and v, and the sums of each read.

    Args:
      kernel, qkv, ranges, leaves: as of `forward`. Fully masked queries are zeros, and so is `do`.
      do: cotangent of the output, `B T N h`.
      lines: m, 1 / l and delta of each row, `B N T`; m is infinite for fully masked rows.
      reads: of arrays whose gradients are asked for.
    """
    each, arrays, counts = (*qkv, do, *lines), stored(leaves), [*map(len, leaves)]
    of_keys = [read for read in reads if read.kind == "key"]
    others = [read for read in reads if read.kind != "key"]
    dq, *by_rows = _by_rows(kernel, counts, others, each, [ranges, *arrays])
    columns = column_ranges(kernel, ranges, qkv[1].shape[1] // kernel.blocks.columns)
    dk, dv, *by_columns = _by_columns(kernel, counts, of_keys, each, [columns, *arrays])
    sums = iter(by_rows), iter(by_columns)
    return (dq, dk, dv), [next(sums[read.kind == "key"]) for read in reads]


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


def _by_rows(
    kernel: Kernel, counts: list[int], reads: Sequence[Read], each: tuple, shared: list
) -> list[jax.Array]:
    (B, T, N, H), h, rows = each[0].shape, each[2].shape[-1], kernel.blocks.rows
    specs, blocks = RowSpecs.of(kernel, each), T // rows
    of_each = [specs.rows(H), specs.head(H), specs.head(h), specs.rows(h), *[specs.line] * 3]
    sums = [
        (specs.line, (B, N, T)) if read.kind == "query" else _of_block(read, kernel, (B, N, blocks))
        for read in reads
    ]
    out = [(specs.rows(H), (B, T, N, H)), *sums]
    return pl.pallas_call(
        functools.partial(_rows_body, kernel, counts, reads),
        grid=(blocks, N, B),
        in_specs=[*of_each, *map(whole, shared)],
        out_specs=[spec for spec, _ in out],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in out],
        name="attend_dq",
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _of_block(read: Read, kernel: Kernel, shape: tuple[int, ...]) -> tuple[pl.BlockSpec, Any]:
    """Where a program of one block of queries and one head stores the sums of a read."""
    length = read.length(kernel.blocks)
    spec = pl.BlockSpec((None, None, None, length), lambda i, n, b: (b, n, i, 0))
    return spec, (*shape, length)


def _by_columns(
    kernel: Kernel, counts: list[int], reads: Sequence[Read], each: tuple, shared: list
) -> list[jax.Array]:
    (B, T, N, H), (S, K, h) = each[0].shape, each[2].shape[1:]
    columns, group = kernel.blocks.columns, N // K

    def of_group(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, T, group, width), lambda j, n, b: (b, 0, n, 0))

    def of_columns(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, columns, None, width), lambda j, n, b: (b, j, n, 0))

    line = pl.BlockSpec((None, group, T), lambda j, n, b: (b, n, 0))
    of_each = [of_group(H), of_columns(H), of_columns(h), of_group(h), *[line] * 3]
    of_keys = pl.BlockSpec((None, group, columns), lambda j, n, b: (b, n, j))
    shapes = ((B, S, K, H), (B, S, K, h), *[(B, N, S)] * len(reads))
    return pl.pallas_call(
        functools.partial(_columns_body, kernel, counts, reads, group),
        grid=(S // columns, K, B),
        in_specs=[*of_each, *map(whole, shared)],
        out_specs=[of_columns(H), of_columns(h), *[of_keys] * len(reads)],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        name="attend_dk_dv",
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _rows_body(kernel: Kernel, counts: list[int], reads: Sequence[Read], *refs: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    leaf_refs, (dq_ref, *sum_refs) = refs[8 : 8 + sum(counts)], refs[8 + sum(counts) :]
    block, columns = Block.of(kernel, leaf_refs, counts), kernel.blocks.columns
    i, n, b = map(pl.program_id, range(3))
    q, do, lines = q_ref[...], do_ref[...], [ref[...][:, None] for ref in line_refs]

    def step(masked: bool, j: Any, carry: Any) -> Any:
        dq, sums = carry
        k, v = (ref[pl.ds(j * columns, columns), :] for ref in (k_ref, v_ref))
        changes = _gradients(block, (b, n, i, j), reads, masked, q, k, v, do, lines)
        if masked:
            k = without_hidden(changes.visible, k)
        return dq + dot(kernel, changes.ds.astype(k.dtype), k, 0), changes.added(reads, sums)

    ends = ends_of(ranges_ref, b, i, functools.partial(bounds, kernel))
    dq, sums = loops(step, ends, (jnp.zeros(q.shape, jnp.float32), _zeros(kernel, reads)))
    for ref, value in zip((dq_ref, *sum_refs), (dq, *sums), strict=True):
        ref[...] = value


def _columns_body(
    kernel: Kernel, counts: list[int], reads: Sequence[Read], group: int, *refs: Any
) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    leaf_refs, (dk_ref, dv_ref, *sum_refs) = refs[8 : 8 + sum(counts)], refs[8 + sum(counts) :]
    block, rows = Block.of(kernel, leaf_refs, counts), kernel.blocks.rows
    j, head, b = map(pl.program_id, range(3))
    k, v, ends = k_ref[...], v_ref[...], ends_of(ranges_ref, b, j)

    def of_head(g: Any, carry: Any) -> Any:
        def step(masked: bool, i: Any, carry: Any) -> Any:
            dk, dv, sums = carry
            of_rows = pl.ds(i * rows, rows)
            q, do = (ref[of_rows, g, :] for ref in (q_ref, do_ref))
            lines = [ref[g, of_rows][None] for ref in line_refs]
            at = (b, head * group + g, i, j)
            changes = _gradients(block, at, reads, masked, q, k, v, do, lines, q_axis=1)
            dk = dk + dot(kernel, changes.ds.astype(q.dtype), q, 0)
            dv = dv + dot(kernel, changes.weights.astype(do.dtype), do, 0)
            return dk, dv, changes.added(reads, sums)

        *carry, sums = loops(step, ends, (*carry, _zeros(kernel, reads)))
        for ref, value in zip(sum_refs, sums, strict=True):
            ref[g, :] = value
        return tuple(carry)

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk_ref[...], dv_ref[...] = jax.lax.fori_loop(0, group, of_head, start)


def _zeros(kernel: Kernel, reads: Sequence[Read]) -> list[jax.Array]:
    return [jnp.zeros(read.length(kernel.blocks), jnp.float32) for read in reads]


class _Gradients(NamedTuple):
    """What both kernels multiply: see `_gradients`."""

    visible: jax.Array
    weights: jax.Array  # after the dropout
    ds: jax.Array  # of the logits q.k
    dread: list[jax.Array]  # of what the score reads, for each logit
    at: list[tuple[Any, ...]]  # its indices

    def added(self, reads: Sequence[Read], sums: Sequence[jax.Array]) -> list[jax.Array]:
        """The sums with those of this block."""
        each = zip(reads, sums, self.at, self.dread, strict=True)
        return [read.add(total, at, change) for read, total, at, change in each]


def _gradients(
    block: Block,
    at: tuple,
    reads: Sequence[Read],
    masked: bool,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    lines: list[Any],
    q_axis: int = 0,
) -> _Gradients:
    """The gradients of one block of logits, from which the kernels make all others.

    Args:
      block: the programs.
      at: batch entry, head, and the numbers of the blocks of queries and of keys.
      reads: by which the score is differentiated as well.
      masked: whether the mask is evaluated.
      q, k, v, do: of the block.
      lines: m, 1 / l and delta of its queries, along their axis.
      q_axis: of a block of logits. The kernel of columns has queries along the second: its products
        take logits by keys, and transposing them there would cost registers.
    """
    kernel, (m, inverse, delta) = block.kernel, lines
    index = block.places(*at, q_axis=q_axis)
    visible = jnp.broadcast_to(m != jnp.inf, jnp.broadcast_shapes(*map(jnp.shape, index[2:])))
    if masked:
        visible = visible & block.mask(index)
    pairs = ((q, k), (do, v)) if q_axis == 0 else ((k, q), (v, do))
    logits, dweights = logits_of(kernel, *pairs[0]), dot(kernel, *pairs[1], 1)
    x, pull, indices = differentiated(kernel.score, block.leaves[1], reads, logits, index)
    p = jnp.exp2(((jnp.where(visible, x, -jnp.inf) if masked else x) - m) * LOG2E) * inverse
    weights, dp = block.drop(index, p, dweights)
    pulled = pull(jnp.where(visible, p * (dp - delta), 0.0))
    ds, *dread = (jnp.where(visible, x.astype(jnp.float32), 0.0) for x in pulled)
    return _Gradients(visible, weights, ds, dread, indices)
