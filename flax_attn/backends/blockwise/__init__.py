"""Blockwise attention in plain JAX: memory linear in the lengths, masked blocks skipped.

An online softmax over blocks of keys for each block of queries (Milakov and Gimelshein, 2018; Dao
et al., 2022). The residuals of the backward pass are the output, in float32 or wider, and each
row's maximum m and sum l = sum exp(score - m); the blocks are recomputed:

    p  = exp(score(scale * q.k) - m) / l       rows cols
    ds = p * (do.v - delta)                    delta = rowsum(do * o) - dlse
    dq = scale * ds.k      dk = scale * ds'.q      dv = p'.do

with dropout applied to p in dv and to do.v in ds, and `ds` backpropagated through the score to its
parameters. m and l are kept apart because m + log(l) loses log(l) to rounding when m is -1e9. Sinks
are added to m and l at the end, and o is scaled down by their share.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import reference
from ..._internal.arrays import unify_varying, zero_to_one
from ..._internal.types import wide
from ...quantized import Quantized
from ...reference import Stats
from ...rules import Rules, sizes_of
from ...where import platform_of
from ..hoist import hoist
from ..protocol import zero_gradient
from ..sinks import add_sinks, gradient, output_share
from .block import leaves_of, record_dropout
from .decode import forward_decode, untransposed
from .online_softmax import backward_heads, forward_heads
from .plan import BlockPlan, PlanOptions, make_plan

Stored = Any  # an array B S K H, or Quantized as a cache stores it, B K S H


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **options: Unpack[PlanOptions],
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"]]:
    """Output in the dtype of q and log-sum-exp in float32 or wider, for bound rules."""
    o, stats = attention(q, k, v, rules, **options)
    return o, stats.lse


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **options: Unpack[PlanOptions],
) -> tuple[Float[Array, "B T N h"], Stats]:
    """Output in the dtype of q and softmax statistics m and l, for bound rules."""
    sizes = sizes_of(q, k)
    # No block has a size of zero, and the formula costs nothing here.
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.attention(q, k, v, rules)
    if rules.dropout is not None:
        rules = replace(rules, dropout=record_dropout(rules.dropout, sizes))
    made = make_plan(sizes, k.shape[-2], rules, platform_of(q), **options)
    # On a CPU a transpose just before the call would copy the whole cache; undo it instead.
    if made.few and not made.batched:
        made, k, v = untransposed(made, k, v)
    # Loop carries inside `shard_map` must vary over the same mesh axes as what is added to them.
    q, k, v, rules = unify_varying((q, k, v, rules))
    axes = jax.typeof(q).manual_axis_type.varying
    return run(made, *unify_varying((q, k, v, hoist(rules, wide(q.dtype), axes))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: BlockPlan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    """Output and softmax statistics for a plan; keys and values may be quantised to eight bits."""
    return _forward(plan, q, k, v, rules)[0]


# The plan is static: two calls with equal plans and shapes share one compilation.
run = jax.jit(_attend, static_argnums=0)


def _forward(plan: BlockPlan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    part = forward_pass(plan, q, k, v, rules)
    o, stats = with_sinks(rules.sinks, *part)
    # `o` is kept in float32 or wider: rounded to the dtype of q, delta would lose its digits.
    return (o.astype(q.dtype), stats), (q, k, v, rules, o, *part[1:])


def forward_pass(plan: BlockPlan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    """Output in float32 or wider, and m and l of each row, B N T, without the sinks."""
    return (forward_decode if plan.few else forward_heads)(plan, q, k, v, rules)


def with_sinks(sinks: Any, o: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, Stats]:
    """Output scaled down by the share of the sinks, if any, and the softmax statistics.

    The result does not depend on the shift m, so the gradient of the log-sum-exp is that of l.
    """
    if sinks is not None:
        before = Stats(m, l)
        m, l = after = add_sinks(before, sinks)
        o = o * jnp.swapaxes(output_share(before, after), 1, 2)[..., None]
    # A fully masked row has l = 0 and m = -inf; a finite m keeps its log-sum-exp at -inf, not NaN.
    return o, Stats(jax.lax.stop_gradient(jnp.where(l == 0, 0, m)), l)


def _backward(plan: BlockPlan, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, rules, *rows = residuals
    rows += [cotangents[0], cotangents[1].l]
    # The backward pass reads B S K H; gradients return in the layout that the keys came in.
    if not isinstance(k, Quantized):
        if plan.layout == "tokens first":
            return backward_pass(plan, q, k, v, rules, *rows)
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        dq, dk, dv, drules = backward_pass(plan, q, k, v, rules, *rows)
        return dq, jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2), drules
    # Dequantised as wide as the logits, so that the weights are those of the forward pass.
    wide_k, wide_v = (jnp.swapaxes(x.dequantized(wide(q.dtype)), 1, 2) for x in (k, v))
    dq, _, _, drules = backward_pass(plan, q.astype(wide_k.dtype), wide_k, wide_v, rules, *rows)
    return dq.astype(q.dtype), *jax.tree.map(zero_gradient, (k, v)), drules


def backward_pass(plan: BlockPlan, q, k, v, rules: Rules, o, m, l, do, dl) -> tuple[Any, ...]:
    """Gradients of q, k, v and the rules.

    o, m and l are without the sinks; `dl` is the cotangent of the l that `with_sinks` returns.
    """
    rows, dsinks = row_statistics(rules.sinks, o, m, l, do, dl)
    *grads, drules = gradients(plan, q, k, v, rules, do, rows)
    return *grads, drules if dsinks is None else replace(drules, sinks=dsinks)


def row_statistics(sinks: Any, o, m, l, do, dl) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """m, 1 / l and delta of each row, as `gradients` takes them; and the gradient of the sinks."""
    # Fully masked rows get m = inf, so that every recomputed weight exp(score - m) is zero.
    dead, dsinks = l == 0, None
    # d lse / d l = 1 / l, and stats carry l itself: the cotangent of the lse is dl * l.
    m, l = stats = Stats(m, l) if sinks is None else add_sinks(Stats(m, l), sinks)
    dlse = dl * l
    delta = jnp.sum(do.astype(o.dtype) * o, axis=-1)  # B T N
    delta = jnp.swapaxes(delta, 1, 2) - dlse  # B N T
    if sinks is not None:
        dsinks = gradient(sinks, stats, jnp.where(dead, -dlse, delta))
    return (jnp.where(dead, jnp.inf, m), 1 / zero_to_one(l), jnp.where(dead, 0, delta)), dsinks


def gradients(plan: BlockPlan, q, k, v, rules: Rules, do, rows: tuple) -> tuple[Any, ...]:
    """Gradients of q, k, v and the rules except the sinks; zeros where none flow.

    `rows` may describe a softmax over more keys than `k` holds: gradients over several parts of the
    keys add up, which ring attention uses.
    """
    with jax.default_matmul_precision(plan.precision):
        *grads, dscale, dscore = backward_heads(plan, q, k, v, rules, do, *rows)
    drules = jax.tree.map(zero_gradient, rules)
    drules = replace(drules, score=leaves_of(drules.score)[1](dscore))
    return *grads, drules if dscale is None else replace(drules, scale=dscale)


_attend.defvjp(_forward, _backward)
