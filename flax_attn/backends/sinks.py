"""Attention sinks for kernels without them: one more logit a head, in the denominator alone.

m' = max(m, sink)      l' = l * exp(m - m') + exp(sink - m')
o' = o * l * exp(m - m') / l'
dsink = -sum over rows of exp(sink - m') / l' * delta,      delta = rowsum(do * o') - dlse
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.arrays import zero_to_one
from ..reference import Stats


def add_sinks(stats: Stats, sinks: Float[Array, " N"]) -> Stats:
    """m' and l' of each row, `B N T`, with its head's sink."""
    sinks = broadcast_to_rows(sinks, stats)
    m = jnp.maximum(stats.m, sinks)
    m = jnp.where(m == -jnp.inf, 0, m)  # a sink of -inf in a fully masked row
    return Stats(m, stats.l * jnp.exp(stats.m - m) + jnp.exp(sinks - m))


def output_share(before: Stats, after: Stats) -> Float[Array, "B N T"]:
    """Factor of a row's output, `l * exp(m - m') / l'`."""
    return before.l * jnp.exp(before.m - after.m) / zero_to_one(after.l)


def gradient(sinks: Float[Array, " N"], after: Stats, delta: jax.Array) -> Float[Array, " N"]:
    """Gradient of the sinks from each row's `delta`, `B N T`."""
    weight = jnp.exp(broadcast_to_rows(sinks, after) - after.m) / zero_to_one(after.l)
    return -jnp.sum(weight * delta, axis=(0, 2)).astype(sinks.dtype)


def broadcast_to_rows(sinks: Float[Array, " N"], stats: Stats) -> Float[Array, "B N T"]:
    """Each row's sink, in the dtype of its m."""
    return jnp.broadcast_to(sinks.astype(stats.m.dtype)[None, :, None], stats.m.shape)
