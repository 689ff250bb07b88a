"""Attention in blocks without derivative rules of its own: JAX differentiates it in any order.

The other backends in blocks have custom gradients, which serve reverse mode alone. Here each block
of queries is a `jax.checkpoint` around a `lax.scan` over blocks of keys (Rabe and Staats, 2021), so
forward mode, reverse mode and any order of both need memory linear in the lengths:

    m = max over keys of score, without derivatives      a first scan
    l = sum exp(score - m)      o = sum exp(score - m) . v      a second one
    output = o / l

The result does not depend on m, so m is a constant for every derivative. l and o are plain sums:
nothing of a block but its inputs is kept for their derivatives. It costs one more product q.k than
`blockwise`, and is taken only if it is asked for by name.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ... import reference
from ..._internal.arrays import unify_varying, zero_to_one
from ..._internal.types import Sizes, wide
from ...masks import Rows
from ...masks.ranges import block_starts, visible_range
from ...reference import Stats, at_most, zero_nonfinite_where_masked
from ...rules import Rules, sizes_of
from ...scores import Additive, Alibi, Identity, T5Bias
from ...where import platform_of
from ..hoist import hoist
from .block import (
    Block,
    dropout_keep,
    finite_where_hidden,
    local,
    modify_logits,
    record_dropout,
    visible_once,
    zero_masked_keys,
)
from .block_loops import join, join_blocks
from .online_softmax import dot
from .plan import static_fully_visible_range, static_visible_range

CPU_PAIRS = 256, 512  # queries of all heads that share a key head, and keys, of a block on a CPU
PAIRS = 1024, 1024  # the same on an accelerator
NO_DERIVATIVE = Identity | Additive | Alibi | T5Bias  # whose derivative is one: no hidden NaN
HEADS_TIMES_COLS = ((2,), (1,)), ((), ())  # a.b' of G R H and C H
ROWS_OF_HEADS = ((2,), (0,)), ((), ())  # a.b of G R C and C H

Step = Callable[[Any, Block, jax.Array, jax.Array], Any]


class ScanPlan(NamedTuple):
    """Static facts: sizes, block sizes, and the blocks of keys that a block of queries reads.

    Attributes:
      groups: query heads that share a key head.
      rows, cols: queries and keys of a block.
      first: for each block of queries, the first block of keys that the static masks show it.
      most: number of blocks of keys from there on, the same for all.
      shown: whether every query is certain to see every key.
      batched: whether all heads run at once instead of one after the other.
      precision: of every product: `jax_default_matmul_precision` at the call.
    """

    sizes: Sizes
    groups: int
    rows: int
    cols: int
    first: tuple[int, ...]
    most: int
    shown: bool
    batched: bool
    precision: Any


def make_plan(
    sizes: Sizes,
    key_heads: int,
    rules: Rules,
    platform: str,
    rows: int | None = None,
    cols: int | None = None,
) -> ScanPlan:
    """The plan for these sizes and bound rules; `rows` and `cols` override its choices."""
    G, (most_rows, most_cols) = sizes.N // key_heads, CPU_PAIRS if platform == "cpu" else PAIRS
    rows = min(rows or max(32, most_rows // G), sizes.T)
    cols = min(cols or most_cols, sizes.S)
    # The same static ranges say where a scan begins and how long it is.
    ranges = [
        static_visible_range(rules.mask, Rows(q, rows), sizes) for q in block_starts(sizes.T, rows)
    ]
    most = max(max(-(-hi // cols) - lo // cols, 1) for lo, hi in ranges)
    last = -(-sizes.S // cols) - most
    return ScanPlan(
        sizes=sizes,
        groups=G,
        rows=rows,
        cols=cols,
        first=tuple(min(lo // cols, last) for lo, _ in ranges),
        most=most,
        shown=static_fully_visible_range(rules.mask, Rows(0, sizes.T), sizes) == (0, sizes.S),
        batched=platform != "cpu",
        precision=getattr(jax.config, "jax_default_matmul_precision"),  # noqa: B009
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **options: Any,
) -> tuple[Float[Array, "B T N h"], Stats]:
    """Output in the dtype of q and softmax statistics m and l, for bound rules."""
    sizes = sizes_of(q, k)
    # No block has a size of zero, and the formula costs nothing here.
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.attention(q, k, v, rules)
    if rules.dropout is not None:
        rules = replace(rules, dropout=record_dropout(rules.dropout, sizes))
    plan = make_plan(sizes, k.shape[-2], rules, platform_of(q), **options)
    # Loop carries inside `shard_map` must vary over the same mesh axes as what is added to them.
    q, k, v, rules = unify_varying((q, k, v, rules))
    axes = jax.typeof(q).manual_axis_type.varying
    return _run(plan, *unify_varying((q, k, v, hoist(rules, wide(q.dtype), axes))))


@partial(jax.jit, static_argnums=0)
def _run(plan: ScanPlan, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
    (B, N, T, _), kind = plan.sizes.shape, q.dtype
    # Gradients of many blocks are summed as wide as the logits.
    heads = tuple(_by_key_head(x.astype(wide(kind)), k.shape[2]) for x in (q, k, v))
    with jax.default_matmul_precision(plan.precision):
        m, sees = _maxima(plan, *jax.lax.stop_gradient((rules, *heads)))
        # Zeros in fully masked queries keep NaN and Inf in them out of the products.
        seeing = jnp.where(jnp.swapaxes(sees, 1, 2)[..., None], heads[0], 0)
        l, o = _sums(plan, rules, seeing, *heads[1:], m)
    dead = l == 0  # U G T
    if rules.sinks is not None:
        l = l + jnp.exp(_sinks(plan, rules, m.dtype) - m)
    # A `where` after the division blocks cotangents, NaN too, of rows without any weight.
    o = jnp.where(dead[..., None], 0, o / zero_to_one(l)[..., None])
    return join(o, B).astype(kind), Stats(m.reshape(B, N, T), l.reshape(B, N, T))


def _by_key_head(x: Float[Array, "B L N W"], key_heads: int) -> Float[Array, "U L G W"]:
    """Batch entries and key heads merged into U; G of the heads belong to each."""
    B, L, N, W = x.shape
    x = x.reshape(B, L, key_heads, N // key_heads, W)
    return jnp.moveaxis(x, 2, 1).reshape(-1, L, N // key_heads, W)


def _sinks(plan: ScanPlan, rules: Rules, kind: Any) -> Float[Array, "U G 1"]:
    sinks = rules.sinks.astype(kind).reshape(-1, plan.groups, 1)
    return jnp.tile(sinks, (plan.sizes.B, 1, 1))


def _maxima(
    plan: ScanPlan,
    rules: Rules,
    q: Float[Array, "U T G H"],
    k: Float[Array, "U S 1 H"],
    v: Float[Array, "U S 1 h"],
) -> tuple[Float[Array, "U G T"], Bool[Array, "U G T"]]:
    """The maximum of each row, with its sink, 0 where there is none; and which rows see a key."""

    def of_rows(at: Block, first: jax.Array, q: Float[Array, "G rows H"], keys: Any) -> tuple:
        def step(carry: tuple, at: Block, k: jax.Array, v: jax.Array) -> tuple:
            m, sees = carry
            x, shown = _scores(plan, rules, rules.score, at, q, k)
            some = True if shown is None else shown.any(axis=2)
            return jnp.maximum(m, x.max(axis=2)), sees | some

        start = jnp.full(q.shape[:2], -jnp.inf, q.dtype), jnp.zeros(q.shape[:2], bool)
        return _scan_keys(plan, rules, at, first, keys, step, start)

    m, sees = _map_query_blocks(plan, of_rows, q, k, v)
    if rules.sinks is not None:
        m = jnp.maximum(m, _sinks(plan, rules, m.dtype))
    return jnp.where(m == -jnp.inf, 0, m), sees


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _sums(plan: ScanPlan, *args: Any) -> tuple[Float[Array, "U G T"], Float[Array, "U G T h"]]:
    """Sums over keys: of exp(score - m), and of the same, after dropout, times v."""
    return _sums_of_blocks(plan, *args)


@_sums.defjvp
def _(plan: ScanPlan, args: tuple, dargs: tuple) -> tuple:
    # The derivative is JAX's own. The sums stand beside it, since JAX keeps everything of a
    # checkpointed function whose derivative is differentiated again, were they part of it.
    return _sums(plan, *args), jax.jvp(partial(_sums_of_blocks, plan), args, dargs)[1]


def _sums_of_blocks(
    plan: ScanPlan,
    rules: Rules,
    q: Float[Array, "U T G H"],
    k: Float[Array, "U S 1 H"],
    v: Float[Array, "U S 1 h"],
    m: Float[Array, "U G T"],
) -> tuple[Float[Array, "U G T"], Float[Array, "U G T h"]]:
    def of_rows(at: Block, first: jax.Array, q: jax.Array, keys: Any, m: jax.Array) -> tuple:
        # Cut in two steps: the gradient of one slice is as large as what it was cut from.
        score = local(rules.score, at._replace(k=0, cols=plan.sizes.S))

        def step(carry: tuple, at: Block, k: jax.Array, v: jax.Array) -> tuple:
            l, o = carry
            x, shown = _scores(plan, rules, score, at, q, k)
            p = jnp.exp(at_most(x, m[..., None]) - m[..., None])
            l = l + p.sum(axis=2)
            if rules.dropout is not None:
                p = rules.dropout.apply(p, dropout_keep(rules.dropout, at))
            v = v if shown is None else zero_masked_keys(v, shown)
            return l, o + dot(p, v, ROWS_OF_HEADS, p.dtype)

        start = jnp.zeros(q.shape[:2], q.dtype), jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype)
        return _scan_keys(plan, rules, at, first, keys, step, start)

    return _map_query_blocks(plan, of_rows, q, k, v, jnp.swapaxes(m, 1, 2))


def _map_query_blocks(
    plan: ScanPlan, of_rows: Callable, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array
) -> Any:
    """`of_rows` of each block of queries of each key head; results G rows ... are joined, U G T ...

    It gets the block, its first block of keys, its queries, all blocks of keys and values, and its
    part of each array of `rest`, U T G.
    """
    sizes, groups = plan.sizes, jnp.int32(plan.sizes.N // plan.groups)
    first = jnp.asarray(np.asarray(plan.first, np.int32))

    def of_head(u: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> Any:
        b, n = jax.lax.div(u, groups), jax.lax.rem(u, groups) * plan.groups
        # Cut before the loops: the gradient of a slice inside them would be an array of all keys.
        keys = tuple(_blocks(x[:, 0], plan.cols) for x in (k, v))

        def of_block(xs: tuple) -> Any:
            i, first, q, *rest = xs
            start = jnp.minimum(i * plan.rows, sizes.T - plan.rows)
            at = Block(b, n, start, 0, plan.groups, plan.rows, plan.cols)
            q, *rest = (jnp.swapaxes(x, 0, 1) for x in (q, *rest))
            return of_rows(at, first, q, keys, *rest)

        blocks = [_blocks(x, plan.rows) for x in rows]
        places = jnp.arange(len(first), dtype=jnp.int32)
        of_block = jax.checkpoint(of_block, prevent_cse=False)
        made = jax.lax.map(of_block, (places, first, *blocks))
        return jax.tree.map(lambda x: join_blocks(x, sizes.T), made)

    xs = jnp.arange(len(k), dtype=jnp.int32), k, v, q, *rest
    return jax.vmap(of_head)(*xs) if plan.batched else jax.lax.map(lambda xs: of_head(*xs), xs)


def _blocks(x: Float[Array, "L ..."], size: int) -> Float[Array, "C size ..."]:
    """Blocks of an array; the last one overlaps the one before it if L is no multiple of `size`."""
    whole = (x.shape[0] - 1) // size * size
    blocks = x[:whole].reshape(-1, size, *x.shape[1:])
    return jnp.concatenate([blocks, x[x.shape[0] - size :][None]])


def _scan_keys(
    plan: ScanPlan, rules: Rules, at: Block, first: jax.Array, keys: Any, step: Step, carry: Any
) -> Any:
    """Runs `carry = step(carry, block, k, v)` over the blocks of keys from `first` on.

    A block that is hidden from all of the queries is skipped at run time.
    """
    cols, S = plan.cols, plan.sizes.S
    carry, _ = unify_varying((carry, keys))  # else a `shard_map` refuses the loop
    lo, hi = visible_range(rules.mask, at.b, Rows(at.q, at.rows, plan.sizes.T), plan.sizes)

    def visit(carry: Any, xs: tuple) -> tuple[Any, None]:
        j, k, v = xs
        # The last block overlaps the one before it, whose keys `fresh` leaves out.
        start, fresh = jnp.minimum(j * cols, S - cols), j * cols if S % cols else None
        here = at._replace(k=start, cols=cols, fresh=fresh)
        # Only the inputs of a step are kept for derivatives, and not its scores and weights.
        run = jax.checkpoint(lambda carry, k, v: step(carry, here, k, v), prevent_cse=False)
        if plan.shown:
            return run(carry, k, v), None
        some = (start < hi) & (start + cols > lo)
        return jax.lax.cond(some, run, lambda carry, k, v: carry, carry, k, v), None

    window = [jax.lax.dynamic_slice_in_dim(x, first, plan.most) for x in keys]
    blocks = first + jnp.arange(plan.most, dtype=jnp.int32)
    return jax.lax.scan(visit, carry, (blocks, *window))[0]


def _scores(
    plan: ScanPlan,
    rules: Rules,
    score: Any,
    at: Block,
    q: Float[Array, "G rows H"],
    k: Float[Array, "cols H"],
) -> tuple[Float[Array, "G rows cols"], Bool[Array, "G rows cols"] | None]:
    """Scores of a block, -inf where hidden, and what is shown; None if all of it is.

    NaN and Inf of hidden logits reach no derivative.
    """
    shown = None if plan.shown and at.fresh is None else visible_once(rules.mask, at)
    k = k if shown is None else zero_masked_keys(k, shown)
    x = dot(q * jnp.asarray(rules.scale, q.dtype), k, HEADS_TIMES_COLS, q.dtype)
    score = local(score, at)
    if shown is not None and not isinstance(rules.score, NO_DERIVATIVE):
        hidden = jax.lax.stop_gradient(zero_nonfinite_where_masked(False, x))
        x, score = jnp.where(shown, x, hidden), finite_where_hidden(score, shown)
    x = modify_logits(score, x, at)
    return x if shown is None else jnp.where(shown, x, -jnp.inf), shown
