"""Attention in blocks, in plain JAX: memory linear in the lengths, hidden blocks skipped.

An online softmax over blocks of keys for each block of queries (Milakov and Gimelshein, 2018; Dao
et al., 2022). The backward pass keeps the output, in float32 or wider, and each row's maximum m and
sum l = sum exp(score - m), and computes the blocks again:

    p  = exp(score(scale * q.k) - m) / l       rows cols
    ds = p * (do.v - delta)                    delta = rowsum(do * o) - dlse
    dq = scale * ds.k      dk = scale * ds'.q      dv = p'.do

with dropout on p in dv and on do.v in ds, and `ds` led back through the score to its parameters.
The log-sum-exp m + log(l) alone would not do: beside an m of -1e9 its log(l) is rounded away. A
sink joins m and l at the end, and o is scaled down by its share.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ... import reference, taps
from ..._internal.arrays import unify_varying
from ..._internal.types import wide
from ...dropout import DropoutMask
from ...quantized import Quantized
from ...reference import Stats
from ...rules import Rules, sizes_of
from ..hoist import hoist
from ..platform import platform_of
from ..protocol import MAX_COPIED_BYTES, is_decode_step, zero_gradient
from ..protocol import passed_over as passed_over_up_to
from ..sinks import add_sinks, gradient, output_share, zero_to_one
from .block import leaves_of
from .decode import forward_decode, untransposed
from .online_softmax import backward_heads, forward_heads
from .plan import Plan, PlanOptions, make_plan

Stored = Any  # an array B S K H, or Quantized as a cache stores it, B K S H
# Queries times keys of a head, up to which the plain formula is as fast.
MAX_REFERENCE_PAIRS = 128 * 128 - 1
# The same in bytes of keys and values a query, in decoding on a CPU.
MAX_DECODE_COPIED_BYTES = 2**16


def passed_over(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    """Why the plain formula is the better choice for a request, or None."""
    few = is_decode_step(sizes_of(q, k), k.shape[-2]) and platform_of(q) == "cpu"
    copied = MAX_DECODE_COPIED_BYTES if few else MAX_COPIED_BYTES
    return passed_over_up_to(q, k, v, rules, MAX_REFERENCE_PAIRS, copied)


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **options: Unpack[PlanOptions],
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"]]:
    """The output, in the dtype of q, and the lse, in float32 or wider, by bound rules."""
    o, stats = attention(q, k, v, rules, **options)
    return o, stats.lse


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **options: Unpack[PlanOptions],
) -> tuple[Float[Array, "B T N h"], Stats]:
    """The output, in the dtype of q, and the parts of the weights, by bound rules."""
    sizes = sizes_of(q, k)
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.attention(q, k, v, rules)
    if rules.dropout is not None and taps.listening():
        keep = jnp.broadcast_to(rules.dropout.grid(sizes), sizes.shape)
        keep_tapped = taps.tap("keep", keep)
        if keep_tapped is not keep:
            rules = replace(rules, dropout=DropoutMask(keep_tapped, rules.dropout.rate))
    made = make_plan(sizes, k.shape[-2], rules, platform_of(q), **options)
    if made.few and not made.batched:
        made, k, v = untransposed(made, k, v)
    q, k, v, rules = unify_varying((q, k, v, rules))
    axes = jax.typeof(q).manual_axis_type.varying
    return run(made, *unify_varying((q, k, v, hoist(rules, wide(q.dtype), axes))))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    """Output and parts of the weights by a plan; keys and values may be in eight bits."""
    return _forward(plan, q, k, v, rules)[0]


run = jax.jit(_attend, static_argnums=0)


def _forward(plan: Plan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    part = forward_pass(plan, q, k, v, rules)
    o, stats = with_sinks(rules.sinks, *part)
    return (o.astype(q.dtype), stats), (q, k, v, rules, o, *part[1:])


def forward_pass(plan: Plan, q: jax.Array, k: Stored, v: Stored, rules: Rules) -> Any:
    """The output in float32 or wider, and m and l of each row, B N T, before the sinks."""
    return (forward_decode if plan.few else forward_heads)(plan, q, k, v, rules)


def with_sinks(sinks: Any, o: jax.Array, m: jax.Array, l: jax.Array) -> tuple[jax.Array, Stats]:
    """The output scaled down by the share of the sinks, if any, and the parts of the weights.

    m is a shift, of which nothing depends: the gradient of the log-sum-exp is that of l alone.
    """
    before, after = Stats(m, l), add_sinks(Stats(m, l), sinks)
    if sinks is not None:
        o = o * jnp.swapaxes(output_share(before, after), 1, 2)[..., None]
    m, l = after
    return o, Stats(jax.lax.stop_gradient(jnp.where(l == 0, 0, m)), l)


def _backward(plan: Plan, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, rules, *rows = residuals
    rows += [cotangents[0], cotangents[1].l]
    if not isinstance(k, Quantized):
        if plan.layout == "tokens first":
            return backward_pass(plan, q, k, v, rules, *rows)
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        dq, dk, dv, drules = backward_pass(plan, q, k, v, rules, *rows)
        return dq, jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2), drules
    # As wide as the logits, so that the weights are those of the forward pass.
    wide_k, wide_v = (jnp.swapaxes(x.dequantized(wide(q.dtype)), 1, 2) for x in (k, v))
    dq, _, _, drules = backward_pass(plan, q.astype(wide_k.dtype), wide_k, wide_v, rules, *rows)
    return dq.astype(q.dtype), *jax.tree.map(zero_gradient, (k, v)), drules


def backward_pass(plan: Plan, q, k, v, rules: Rules, o, m, l, do, dl) -> tuple[Any, ...]:
    """Gradients of q, k, v and the rules from the output, m and l before the sinks, and cotangents.

    `dl` is the cotangent of the l of `with_sinks`.
    """
    rows, dsinks = row_statistics(rules.sinks, o, m, l, do, dl)
    *grads, drules = gradients(plan, q, k, v, rules, do, rows)
    return *grads, drules if dsinks is None else replace(drules, sinks=dsinks)


def row_statistics(sinks: Any, o, m, l, do, dl) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """What `gradients` is told of each row: m, 1 / l and delta; and the gradient of the sinks."""
    dead, dsinks = l == 0, None
    m, l = stats = add_sinks(Stats(m, l), sinks)
    dlse = dl * l
    delta = jnp.sum(do.astype(o.dtype) * o, axis=-1)  # B T N
    delta = jnp.swapaxes(delta, 1, 2) - dlse  # B N T
    if sinks is not None:
        dsinks = gradient(sinks, stats, jnp.where(dead, -dlse, delta))
    return (jnp.where(dead, jnp.inf, m), 1 / zero_to_one(l), jnp.where(dead, 0, delta)), dsinks


def gradients(plan: Plan, q, k, v, rules: Rules, do, rows: tuple) -> tuple[Any, ...]:
    """Gradients of q, k, v and the rules, but for the sinks; zeros where none flow.

    The rows may have seen more keys than these: of several parts of the keys they add up.
    """
    with jax.default_matmul_precision(plan.precision):
        *grads, dscale, dscore = backward_heads(plan, q, k, v, rules, do, *rows)
    drules = jax.tree.map(zero_gradient, rules)
    drules = replace(drules, score=leaves_of(drules.score)[1](dscore))
    return *grads, drules if dscale is None else replace(drules, scale=dscale)


_attend.defvjp(_forward, _backward)
