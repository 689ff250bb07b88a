"""Online softmax of one key head and its G query heads, and the loop over key heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._internal.arrays import unify_varying, zero_to_one
from ..._internal.types import wide
from ...reference import at_most, zero_nonfinite_where_masked
from ...rules import Rules
from ...scores import Additive, Alibi, Identity, T5Bias
from .block import (
    Block,
    add,
    dropout_keep,
    is_per_block,
    leaves_of,
    local,
    modify_logits,
    visible_once,
    zero_masked_keys,
)
from .block_loops import join, scan_heads, scan_key_blocks, scan_query_blocks
from .plan import BlockPlan

# Scores that do not end in a product are rounded the same everywhere: they need no `at_most`.
ADDITIVE_SCORES = Identity | Additive | T5Bias
ROWS_TIMES_COLS = ((1,), (1,)), ((), ())  # a.b' of R H and C H
MATMUL = ((1,), (0,)), ((), ())  # a.b of R C and C H


def dot(a: jax.Array, b: jax.Array, axes: Any, kind: Any) -> jax.Array:
    """Matrix product accumulated in `kind`."""
    return jax.lax.dot_general(a, b, axes, preferred_element_type=kind)


def forward_heads(
    plan: BlockPlan,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Output, m and l, all in float32 or wider and without the sinks."""
    sizes = plan.sizes

    def one(carry, heads, at):
        return scan_query_blocks(plan, at, partial(_forward_rows, plan, rules, heads), carry)

    _, (o, m, l) = scan_heads(plan, plan.batched, one, (), (q, k, v))
    m, l = (x.reshape(sizes.B, sizes.N, sizes.T) for x in (m, l))
    return join(o, sizes.B), m, l


def _forward_rows(plan, rules, heads, carry, at: Block, fresh_from: Any) -> tuple[Any, tuple]:
    """Output, m and l of one block of queries by the online softmax."""
    q, k, v = heads
    kind, shape = wide(q.array.dtype), (at.G, at.rows)
    q, exact = q.rows(at), q.array.dtype == kind and isinstance(rules.score, ADDITIVE_SCORES)

    def step(carry, at, masked):
        m, l, o = carry
        vb = v.cols(at)
        x = _logits(q, k.cols(at), rules, at)
        if not isinstance(rules.score, Identity):
            x = modify_logits(local(rules.score, at), x, at)
        if masked:
            shown = visible_once(rules.mask, at)
            x = jnp.where(shown, x, -jnp.inf)
            vb = zero_masked_keys(vb, shown) if plan.hides_keys else vb
        x = x.reshape(-1, at.cols)
        # A row without a visible key so far has m = -inf; subtracting 0 avoids inf - inf.
        new = jnp.maximum(m, jnp.max(x, axis=1))
        shift = jnp.where(new == -jnp.inf, 0, new)
        # XLA may round a score differently inside the exponential: clip it at the maximum.
        x = x if exact else at_most(x, shift[:, None])
        p = jnp.exp(x - shift[:, None])
        # The factor by which the sums so far shrink when the maximum grows.
        alpha = jnp.exp(m - shift)
        l = alpha * l + jnp.sum(p, axis=1)
        # After the sum: the weights are normalised as if nothing was dropped.
        if rules.dropout is not None:
            p = rules.dropout.apply(p.reshape(*shape, -1), dropout_keep(rules.dropout, at))
        o = alpha[:, None] * o + dot(p.reshape(-1, at.cols), vb.astype(kind), MATMUL, kind)
        return new, l, o

    R = at.G * at.rows
    start = jnp.full(R, -jnp.inf, kind), jnp.zeros(R, kind), jnp.zeros((R, v.array.shape[-1]), kind)
    start = unify_varying((*start, q))[:3]
    m, l, o = scan_key_blocks(plan, rules.mask, at, step, start)
    # One division a row in place of one a weight.
    o = o * (1 / zero_to_one(l))[:, None]
    return carry, (o.reshape(*shape, -1), m.reshape(shape), l.reshape(shape))


def _logits(q: Float[Array, "R H"], k: Float[Array, "cols H"], rules: Rules, at: Block):
    """`scale * q.k` of a block."""
    kind = wide(q.dtype)
    scale = jnp.asarray(rules.scale, kind)
    # Scaling the queries is cheaper, but in 16 bits it would round them.
    if q.dtype == kind:
        x = dot(q * scale, k, ROWS_TIMES_COLS, kind)
    else:
        x = dot(q, k, ROWS_TIMES_COLS, kind) * scale
    return x.reshape(at.G, at.rows, at.cols)


def backward_heads(plan: BlockPlan, q, k, v, rules: Rules, do, m, inv_l, delta) -> tuple[Any, ...]:
    """Gradients of q, k, v, of the scale if it is an array, and of the score's leaves.

    `inv_l` is 1 / l. Fully masked rows have m = inf here.
    """
    B, kind = plan.sizes.B, wide(q.dtype) if plan.adds else q.dtype
    leaves, _ = leaves_of(rules.score)
    totals = jnp.zeros((), wide(q.dtype)), [jnp.zeros(x.shape, wide(x.dtype)) for x in leaves]

    def one(totals, heads, at):
        # dk and dv are accumulated transposed: summing and transposing at once is slow on a CPU.
        start = [jnp.zeros((x.shape[-1], x.shape[1]), wide(x.dtype)) for x in (k, v)]
        start = (*unify_varying((*start, q))[:2], totals)
        rows = partial(_backward_rows, plan, rules, heads)
        (dk, dv, totals), dq = scan_query_blocks(plan, at, rows, start)
        return totals, (dq.astype(kind), dk, dv)

    heads = q, k, v, do, m, inv_l, delta
    start = unify_varying((totals, q))[0]
    # All heads at once would hold a copy of the score's gradients for each head.
    totals, (dq, *dkv) = scan_heads(plan, plan.batched and not leaves, one, start, heads)
    dk, dv = (jnp.moveaxis(x.reshape(B, -1, *x.shape[1:]), 3, 1) for x in dkv)  # B S K H
    dscale = totals[0].astype(rules.scale.dtype) if isinstance(rules.scale, jax.Array) else None
    dleaves = [g.astype(x.dtype) for g, x in zip(totals[1], leaves, strict=True)]
    return *(x.astype(kind) for x in (join(dq, B), dk, dv)), dscale, dleaves


def _backward_rows(
    plan, rules, heads, carry: Any, at: Block, fresh_from: Any
) -> tuple[Any, jax.Array]:
    """Adds one query block to the gradients of keys, values and parameters; its dq."""
    q, k, v, do, m, inv_l, delta = heads
    kind, shape = wide(q.array.dtype), (at.G, at.rows)
    exact = q.array.dtype == kind and isinstance(rules.score, ADDITIVE_SCORES)
    raw, do, m, inv_l, delta = (x.rows(at) for x in (q, do, m, inv_l, delta))
    # Fully masked rows contribute nothing; zeros keep NaN and Inf in them out of the products.
    dead = (m == jnp.inf)[:, None]
    raw, do = jnp.where(dead, 0, raw), jnp.where(dead, 0, do)
    if fresh_from is not None:  # rows before it were processed in an earlier block
        fresh = jnp.broadcast_to(at.indices()[2] >= fresh_from, (*shape, 1)).reshape(-1, 1)
        do, delta = jnp.where(fresh, do, 0), jnp.where(fresh[:, 0], delta, 0)
    scale = jnp.asarray(rules.scale, kind)
    do, by_scale = do.astype(kind), raw.astype(kind) * scale

    def step(carry, at, masked):
        dq, dk, dv, (dscale, totals) = carry
        kb, vb = k.cols(at), v.cols(at)
        shown = visible_once(rules.mask, at) if masked else None
        if shown is not None and plan.hides_keys:
            kb, vb = zero_masked_keys(kb, shown), zero_masked_keys(vb, shown)
        x, back = _score_vjp(rules, _logits(raw, kb, rules, at), at, shown)
        dp = dot(do, vb.astype(kind), ROWS_TIMES_COLS, kind).reshape(x.shape)
        lines = (y.reshape(*shape, 1) for y in (m, inv_l, delta))
        p, ds = _weights(rules, exact, at, x, dp, shown, *lines)
        parts, ds = back(ds)  # from here on the gradient of the logits before the score
        if totals:
            per_block = is_per_block(rules.score)
            totals = [add(*x, at) for x in zip(totals, parts, per_block, strict=True)]
        p, ds = (y.reshape(-1, at.cols) for y in (p, ds))
        dk = _accumulate_kv(dk, dot(by_scale.T, ds, MATMUL, kind), at)
        dv = _accumulate_kv(dv, dot(do.T, p, MATMUL, kind), at)
        return dq + dot(ds, kb.astype(kind), MATMUL, kind), dk, dv, (dscale, totals)

    start = (unify_varying((jnp.zeros(raw.shape, kind), raw))[0], *carry)
    dq, dk, dv, (dscale, totals) = scan_key_blocks(plan, rules.mask, at, step, start)
    # dq here is still ds.k: q times it is the gradient of the scale.
    if isinstance(rules.scale, jax.Array):
        dscale = dscale + jnp.sum(dq * raw.astype(kind))
    return (dk, dv, (dscale, totals)), (dq * scale).reshape(*shape, -1)


def _weights(
    rules, exact: bool, at: Block, x, dp, shown, m, inv_l, delta
) -> tuple[jax.Array, jax.Array]:
    """Weights after dropout and the gradient of the scores, from the scores and do.v."""
    x = x if shown is None else jnp.where(shown, x, -jnp.inf)
    x = x if exact else at_most(x, m)
    p = dropped = jnp.exp(x - m) * inv_l
    if rules.dropout is not None:
        keep = dropout_keep(rules.dropout, at)
        dropped, dp = (rules.dropout.apply(y, keep) for y in (p, dp))
    # p without dropout: delta already sums the weights after dropout.
    ds = p * (dp - delta)
    return dropped, ds if shown is None else jnp.where(shown, ds, 0)


def _accumulate_kv(
    total: Float[Array, "H S"], part: Float[Array, "H cols"], at: Block
) -> jax.Array:
    part = part + jax.lax.dynamic_slice_in_dim(total, at.k, at.cols, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, part, at.k, axis=1)


def _score_vjp(rules: Rules, x: jax.Array, at: Block, shown: Any) -> tuple[jax.Array, Callable]:
    """Modified logits and a vjp for the score's parameters and the logits.

    At masked places NaN and Inf are replaced before the score, and no gradient passes.
    """
    if isinstance(rules.score, Identity):
        return x, lambda ds: ([], ds)
    leaves, unflatten = leaves_of(local(rules.score, at))
    # The derivative of a sum is one, so a masked NaN cannot reach a gradient through it.
    if shown is None or isinstance(rules.score, Additive | Alibi | T5Bias):
        return jax.vjp(lambda leaves, x: modify_logits(unflatten(leaves), x, at), leaves, x)
    per_block, x = is_per_block(rules.score), zero_nonfinite_where_masked(shown, x)

    def change(leaves: list, x: jax.Array) -> jax.Array:
        parts = zip(leaves, per_block, strict=True)
        return modify_logits(
            unflatten([zero_nonfinite_where_masked(shown, y) if c else y for y, c in parts]), x, at
        )

    out, back = jax.vjp(change, leaves, x)

    def vjp_where_visible(ds: jax.Array) -> Any:
        parts, dx = back(ds)
        return parts, jnp.where(shown, dx, 0)

    return out, vjp_where_visible
