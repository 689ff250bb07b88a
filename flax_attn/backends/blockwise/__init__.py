"""Attention in blocks, in plain JAX: memory linear in the lengths, hidden blocks skipped.

An online softmax over blocks of keys for each block of queries (Milakov and Gimelshein, 2018; Dao
et al., 2022). The backward pass keeps output and log-sum-exp alone and computes the blocks again:

    p  = exp(score(scale * q.k) - lse)        rows cols
    ds = p * (do.v - (rowsum(do * o) - dlse))
    dq = scale * ds.k      dk = scale * ds'.q      dv = p'.do

with dropout on p in dv and on do.v in ds, and `ds` led back through the score to its parameters. A
sink is added at the end: `lse' = logaddexp(lse, sink)`, `o' = o * exp(lse - lse')`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ... import reference, taps
from ..._arrays import varying_alike
from ..._types import wide
from ...rules import Rules, sizes_of
from ..platform import platform_of
from .block import leaves_of
from .hoist import hoist
from .plan import Plan, plan_of
from .units import backward_units, forward_units

SMALL = 128 * 128  # weights a head


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    **how: Any,
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"]]:
    """The output, in the dtype of q, and the lse, in float32 or wider, by bound rules."""
    sizes = sizes_of(q, k)
    if 0 in (*q.shape, *k.shape, *v.shape):
        return reference.forward(q, k, v, rules)
    if rules.dropout is not None and taps.listening():
        taps.tap("keep", jnp.broadcast_to(rules.dropout.grid(sizes), sizes.shape))
    plan = plan_of(sizes, k.shape[2], rules, platform_of(q), **how)
    return _run(plan, *varying_alike((q, k, v, hoist(rules, wide(q.dtype)))))


def aside(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> str | None:
    """Why the plain formula is the better choice: it is quicker on small ones, and shows points."""
    if q.shape[1] * k.shape[1] < SMALL:
        return f"the plain formula is as quick for {q.shape[1]} x {k.shape[1]} weights"
    return "somebody listens to the weights" if taps.listening() else None


@partial(jax.jit, static_argnums=0)
def _run(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
    return _attend(plan, q, k, v, rules)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
    return _forward(plan, q, k, v, rules)[0]


def _forward(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
    o, own = forward_units(plan, q, k, v, rules)
    lse = own
    if rules.sinks is not None:
        lse = jnp.logaddexp(own, _sinks(rules, own))
        share = jnp.exp(own - _finite(lse))  # B N T
        o = o * jnp.swapaxes(share, 1, 2)[..., None]
    o = o.astype(q.dtype)
    return (o, lse), (q, k, v, rules, o, own, lse)


def _backward(plan: Plan, kept: tuple, given: tuple) -> tuple:
    q, k, v, rules, o, own, lse = kept
    do, dlse = given
    dead = own == -jnp.inf  # B N T
    kind = lse.dtype
    change = jnp.sum(do.astype(kind) * o.astype(kind), axis=-1)  # B T N
    change = jnp.swapaxes(change, 1, 2) - dlse  # B N T
    dsinks = None
    if rules.sinks is not None:
        share = jnp.exp(_sinks(rules, lse) - _finite(lse))
        dsinks = -jnp.sum(share * change, axis=(0, 2)).astype(rules.sinks.dtype)
    change, shut = jnp.where(dead, 0, change), jnp.where(dead, jnp.inf, lse)
    with jax.default_matmul_precision(plan.precision):
        *grads, dscore = backward_units(plan, q, k, v, rules, do, shut, change)
    return *grads[:3], _cotangent(rules, grads[3], dscore, dsinks)


_attend.defvjp(_forward, _backward)


def _sinks(rules: Rules, lse: jax.Array) -> jax.Array:
    return jnp.broadcast_to(rules.sinks.astype(lse.dtype)[None, :, None], lse.shape)


def _finite(lse: jax.Array) -> jax.Array:
    return jnp.where(lse == -jnp.inf, 0, lse)


def _cotangent(rules: Rules, dscale: Any, dscore: list[jax.Array], dsinks: Any) -> Rules:
    """The gradients in the structure of the rules; zeros where none flow."""
    zeros = jax.tree.map(_zero, rules)
    grads = {"scale": dscale, "sinks": dsinks, "score": leaves_of(zeros.score)[1](dscore)}
    return replace(zeros, **{name: g for name, g in grads.items() if g is not None})


def _zero(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    known = all(isinstance(n, int) for n in x.shape)  # else `jax.export` left a size open
    return np.zeros(x.shape, jax.dtypes.float0) if known else None
