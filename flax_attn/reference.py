"""Attention by the plain formula: the law that every other backend is measured against.

    logits  = scale * q.k                      B N T S
    scores  = mask(score(logits))              -inf where a query may not look
    weights = exp(scores) / (sum over S + exp(sink))
    output  = dropout(weights) . v             B T N h

Softmax and accumulation run in `promote_types(dtype, float32)`. A row that may look at nothing has
zero weights, zero gradients and, without a sink, an lse of -inf.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import Sizes, wide
from .masks import Full
from .rules import Rules, sizes_of
from .taps import tap


def softmax(
    scores: Float[Array, "*B T S"], sinks: Float[Array, "*#B #T"] | None = None
) -> Float[Array, "*B T S"]:
    """`exp(scores) / (sum + exp(sinks))` over the last axis, zero for a row that is all -inf.

    Computed in `promote_types(dtype, float32)`, returned in the dtype of `scores`. torch and jax
    give NaN for a row that is all -inf.

    >>> softmax(jnp.asarray([[0.0, 0.0], [-jnp.inf, -jnp.inf]])).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    return softmax_and_lse(scores, sinks)[0].astype(scores.dtype)


def softmax_and_lse(
    scores: Float[Array, "*B T S"], sinks: Float[Array, "*#B #T"] | None = None
) -> tuple[Float[Array, "*B T S"], Float[Array, "*B T"]]:
    """The softmax over the last axis and its log-sum-exp, both in float32 or wider."""
    scores = scores.astype(wide(scores.dtype))
    most = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)
        most = jnp.maximum(most, sinks)
    most = jax.lax.stop_gradient(jnp.where(most == -jnp.inf, 0.0, most))
    powers = jnp.exp(scores - most[..., None])
    total = powers.sum(axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - most)
    some = total != 0
    total = jnp.where(some, total, 1.0)
    return powers / total[..., None], jnp.where(some, most + jnp.log(total), -jnp.inf)


def weigh(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], rules: Rules
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T"]]:
    """The weights before dropout and the lse, by bound rules; query head n reads key head n//G."""
    sizes, kind = sizes_of(q, k), wide(q.dtype)
    groups = (k.shape[2], sizes.N // k.shape[2])  # K, G
    q = q.reshape(*q.shape[:2], *groups, q.shape[3])  # B T K G H
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=kind)
    logits = logits.reshape(sizes.B, sizes.N, sizes.T, sizes.S) * jnp.asarray(rules.scale, kind)
    scores = rules.score.grid(logits, sizes)
    if not isinstance(rules.mask, Full):
        scores = jnp.where(rules.mask.grid(sizes), scores, -jnp.inf)
    sinks = None if rules.sinks is None else rules.sinks[None, :, None]  # 1 N 1
    return softmax_and_lse(tap("scores", scores), sinks)


def forward(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K h"], rules: Rules
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"]]:
    """The output, in the dtype of q, and the lse, in float32 or wider, by bound rules."""
    q, k, v = silence(q, k, v, rules)
    weights, lse = weigh(q, k, rules)
    weights = tap("weights", weights)
    if rules.dropout is not None:
        keep = jnp.broadcast_to(rules.dropout.grid(sizes_of(q, k)), weights.shape)
        weights = rules.dropout.apply(weights, tap("keep", keep))
    groups = (k.shape[2], q.shape[2] // k.shape[2])  # K, G
    weights = weights.reshape(weights.shape[0], *groups, *weights.shape[2:])  # B K G T S
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(weights.dtype))
    o = o.reshape(*q.shape[:3], v.shape[3]).astype(q.dtype)
    return o, lse


def silence(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K h"], rules: Rules
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K h"]]:
    """Zeros in place of queries that see nothing and of keys and values that nobody sees.

    NaN and Inf that stand there then reach neither outputs nor gradients.
    """
    if isinstance(rules.mask, Full):
        return q, k, v
    sizes: Sizes = sizes_of(q, k)
    seen = jnp.broadcast_to(rules.mask.grid(sizes), (sizes.B, sizes.N, sizes.T, sizes.S))
    sees = jnp.swapaxes(seen.any(axis=3), 1, 2)[..., None]  # B T N 1
    groups = (k.shape[2], sizes.N // k.shape[2])  # K, G
    keys = seen.any(axis=2).reshape(sizes.B, *groups, sizes.S).any(axis=2)  # B K S
    keys = jnp.swapaxes(keys, 1, 2)[..., None]  # B S K 1
    return jnp.where(sees, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)
