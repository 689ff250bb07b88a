"""The backward pass in Pallas for Triton: dq by rows of queries, dk and dv by columns of keys.

    p  = exp(score(scale * q.k) - m) / l       rows cols
    ds = p * (do.v - delta)                    delta = rowsum(do * o) - dlse
    dq = ds'.k      dk = ds'.q      dv = p.do      ds' = ds through the score and the scale

Both kernels compute p again, so that each writes its own part and no two write the same: nothing is
added atomically, and every run gives the same bits. The score is differentiated inside.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .contract import Leaf
from .triton import LOG2E, Kernel, bounds, compiler, dot, leaf_of, stored


def backward(
    kernel: Kernel,
    qkv: tuple[jax.Array, ...],
    do: jax.Array,
    rows: list[jax.Array],
    ranges: jax.Array,
    leaves: Any,
) -> tuple[jax.Array, ...]:
    """dq, dk and dv in float32, in the shapes of q, k and v.

    Args:
      kernel, qkv, ranges, leaves: as of `forward`.
      do: cotangent of the output, `B T N h`.
      rows: m, 1 / l and delta of each row, `B N T`; m is infinite for fully masked rows.
    """
    arrays = [stored(x) for each in leaves for x in each]
    counts = [*map(len, leaves)]
    dq = _by_rows(kernel, counts, (*qkv, do, *rows), (ranges, *arrays))
    columns = column_ranges(kernel, ranges, qkv[1].shape[1] // kernel.blocks.columns)
    return dq, *_by_columns(kernel, counts, (*qkv, do, *rows), (columns, *arrays))


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


def _by_rows(kernel: Kernel, counts: list[int], each: tuple, shared: tuple) -> jax.Array:
    (B, T, N, H), (S, K, h) = each[0].shape, each[2].shape[1:]
    rows = kernel.blocks.rows

    def of_head(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, S, None, width), lambda i, n, b: (b, 0, n // (N // K), 0))

    def of_rows(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, None, width), lambda i, n, b: (b, i, n, 0))

    lines = pl.BlockSpec((None, None, rows), lambda i, n, b: (b, n, i))
    whole = [pl.BlockSpec(x.shape, lambda i, n, b, x=x: (0,) * x.ndim) for x in shared]
    return pl.pallas_call(
        functools.partial(_rows_body, kernel, counts),
        grid=(T // rows, N, B),
        in_specs=[of_rows(H), of_head(H), of_head(h), of_rows(h), *[lines] * 3, *whole],
        out_specs=of_rows(H),
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), jnp.float32),
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _by_columns(kernel: Kernel, counts: list[int], each: tuple, shared: tuple) -> list[jax.Array]:
    (B, T, N, H), (S, K, h) = each[0].shape, each[2].shape[1:]
    columns, group = kernel.blocks.columns, N // K

    def of_group(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, T, group, width), lambda j, n, b: (b, 0, n, 0))

    def of_columns(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, columns, None, width), lambda j, n, b: (b, j, n, 0))

    lines = pl.BlockSpec((None, group, T), lambda j, n, b: (b, n, 0))
    whole = [pl.BlockSpec(x.shape, lambda j, n, b, x=x: (0,) * x.ndim) for x in shared]
    shapes = ((B, S, K, H), (B, S, K, h))
    return pl.pallas_call(
        functools.partial(_columns_body, kernel, counts, group),
        grid=(S // columns, K, B),
        in_specs=[of_group(H), of_columns(H), of_columns(h), of_group(h), *[lines] * 3, *whole],
        out_specs=[of_columns(H), of_columns(h)],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        interpret=kernel.interpret,
        **compiler(kernel),
    )(*each, *shared)


def _rows_body(kernel: Kernel, counts: list[int], *refs: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    *leaf_refs, dq_ref = refs[8:]
    (rows, columns), i, n, b = kernel.blocks[:2], *map(pl.program_id, range(3))
    block = _Block(kernel, _grouped(leaf_refs, counts))
    q, do, lines = q_ref[...], do_ref[...], [ref[...][:, None] for ref in line_refs]

    def step(masked: bool, j: Any, dq: Any) -> Any:
        k, v = (ref[pl.ds(j * columns, columns), :] for ref in (k_ref, v_ref))
        k, _, ds, _ = block.gradients((b, n, i, j), masked, q, k, v, do, lines)
        return dq + dot(kernel, ds.astype(k.dtype), k, 0)

    entry = jnp.minimum(b, ranges_ref.shape[0] - 1)
    ends = bounds(kernel, *(ranges_ref[entry, i, x] for x in range(4)))
    dq_ref[...] = _loops(step, ends, jnp.zeros((rows, q.shape[-1]), jnp.float32))


def _columns_body(kernel: Kernel, counts: list[int], group: int, *refs: Any) -> None:
    q_ref, k_ref, v_ref, do_ref, *line_refs, ranges_ref = refs[:8]
    *leaf_refs, dk_ref, dv_ref = refs[8:]
    (rows, columns), j, head, b = kernel.blocks[:2], *map(pl.program_id, range(3))
    block = _Block(kernel, _grouped(leaf_refs, counts))
    k, v = k_ref[...], v_ref[...]
    entry = jnp.minimum(b, ranges_ref.shape[0] - 1)
    ends = tuple(ranges_ref[entry, j, x] for x in range(4))

    def of_head(g: Any, carry: Any) -> Any:
        def step(masked: bool, i: Any, carry: Any) -> Any:
            dk, dv = carry
            of_rows = pl.ds(i * rows, rows)
            q, do = (ref[of_rows, g, :] for ref in (q_ref, do_ref))
            lines = [ref[g, of_rows][:, None] for ref in line_refs]
            _, p, ds, do = block.gradients((b, head * group + g, i, j), masked, q, k, v, do, lines)
            dk = dk + dot(kernel, ds.astype(q.dtype).T, q, 0)
            return dk, dv + dot(kernel, p.astype(do.dtype).T, do, 0)

        return _loops(step, ends, carry)

    start = tuple(jnp.zeros((columns, x.shape[-1]), jnp.float32) for x in (k, v))
    dk_ref[...], dv_ref[...] = jax.lax.fori_loop(0, group, of_head, start)


def _loops(step: Any, ends: tuple[Any, ...], carry: Any) -> Any:
    """Runs blocks that need a mask, those that need none, and again those that do."""
    for first, end, masked in zip(ends[:3], ends[1:], (True, False, True), strict=True):
        carry = jax.lax.fori_loop(first, end, functools.partial(step, masked), carry)
    return carry


def _grouped(refs: list[Any], counts: list[int]) -> list[list[Leaf]]:
    leaves = iter([leaf_of(ref) for ref in refs])
    return [[next(leaves) for _ in range(count)] for count in counts]


class _Block(NamedTuple):
    """What both kernels compute of a block of queries and keys."""

    kernel: Kernel
    leaves: list[list[Leaf]]

    def gradients(
        self, at: tuple[Any, ...], masked: bool, q: Any, k: Any, v: Any, do: Any, lines: list[Any]
    ) -> tuple[Any, ...]:
        """k without what no query sees, p with dropout, ds of the unscaled logits, and do.

        Args:
          at: batch entry, head, and the numbers of the blocks of queries and of keys.
          masked: whether the mask is evaluated.
          q, k, v, do: of the block.
          lines: m, 1 / l and delta of its rows.
        """
        (rows, columns), (b, n, i, j), (m, share, delta) = self.kernel.blocks[:2], at, lines
        q_idx = i * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        k_idx = j * columns + jax.lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        index, (of_mask, of_score, of_keep) = (b, n, q_idx, k_idx), self.leaves
        seen = m != jnp.inf
        if masked:
            seen = seen & self.kernel.mask(of_mask, *index) & (k_idx < self.kernel.sizes.S)
            keys = jnp.max(jnp.broadcast_to(seen, (rows, columns)).astype(jnp.int32), axis=0) > 0
            k, v = (jnp.where(keys[:, None], x, jnp.zeros_like(x)) for x in (k, v))
        seen = jnp.broadcast_to(seen, (rows, columns))

        def score(logits: jax.Array) -> jax.Array:
            x = self.kernel.score(of_score, logits, *index)
            return jnp.broadcast_to(x, (rows, columns))

        x, pull = jax.vjp(score, dot(self.kernel, q, k, 1))
        p = jnp.where(seen, jnp.exp2((x - jnp.where(seen, m, 0.0)) * LOG2E) * share, 0.0)
        dp, kept = dot(self.kernel, do, v, 1), p
        if self.kernel.keep is not None:
            rest = 1.0 - self.kernel.rate if self.kernel.rate < 1 else jnp.inf
            keep = self.kernel.keep(of_keep, *index)
            dp, kept = (jnp.where(keep, y / rest, 0.0) for y in (dp, p))
        (ds,) = pull(jnp.where(seen, p * (dp - delta), 0.0))
        return k, kept, jnp.where(seen, ds, 0.0), do
