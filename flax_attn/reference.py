"""Attention by the plain formula: the reference for all other backends.

    logits  = scale * q.k                      B N T S
    scores  = mask(score(logits))              -inf where masked
    weights = exp(scores) / (sum over S + exp(sink))
    output  = dropout(weights) . v             B T N h

Softmax and accumulation run in `promote_types(dtype, float32)`. A fully masked row has zero
weights, zero gradients and, without a sink, an lse of -inf.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ._internal.types import Sizes, wide
from .masks import Full, Mask
from .rules import Rules, sizes_of
from .scores import Additive, Alibi, Chain, Identity, Score, T5Bias
from .taps import listening, tap


class Stats(NamedTuple):
    """Softmax statistics per row: the maximum score m, and l = sum(exp(score - m)); both finite.

    A fully masked row has l = 0. Attention over parts of the keys is combined from these, since the
    log-sum-exp m + log(l) would lose log(l) for an m of -1e9.
    """

    m: Float[Array, "*B N T"]
    l: Float[Array, "*B N T"]

    @property
    def lse(self) -> Float[Array, "*B N T"]:
        some = self.l != 0
        return jnp.where(some, self.m + jnp.log(jnp.where(some, self.l, 1.0)), -jnp.inf)


def softmax(
    scores: Float[Array, "*B T S"], sinks: Float[Array, "*#B #T"] | None = None
) -> Float[Array, "*B T S"]:
    """`exp(scores) / (sum + exp(sinks))` over the last axis, zero for a row that is all -inf.

    Computed in `promote_types(dtype, float32)`, returned in the dtype of `scores`. torch and jax
    give NaN for a row that is all -inf.

    Args:
      scores: logits, -inf where masked.
      sinks: one more logit per row, only in the denominator, or None.

    Raises:
      TypeError: if `sinks` does not broadcast to the rows.
      ValueError: if `scores` is not floating.

    Source: Vaswani et al., "Attention Is All You Need", 2017.

    >>> softmax(jnp.asarray([[0.0, 0.0], [-jnp.inf, -jnp.inf]])).tolist()
    [[0.5, 0.5], [0.0, 0.0]]
    """
    return softmax_and_stats(scores, sinks)[0].astype(scores.dtype)


def softmax_and_lse(
    scores: Float[Array, "*B T S"], sinks: Float[Array, "*#B #T"] | None = None
) -> tuple[Float[Array, "*B T S"], Float[Array, "*B T"]]:
    """The softmax over the last axis and its log-sum-exp, both in float32 or wider."""
    weights, stats = softmax_and_stats(scores, sinks)
    return weights, stats.lse


# `minimum(scores, m)` with the derivative of the identity. No score exceeds m, the maximum of its
# row, in exact arithmetic. But XLA may fuse the subtraction of m into a product that computes the
# score, with another rounding than in m: for scores beyond 3e9 exp of the difference is infinite.
at_most = jax.custom_jvp(lambda scores, m: jnp.where(scores > m, m, scores))
at_most.defjvp(lambda primals, tangents: (at_most(*primals), tangents[0]))


@jax.jit
def softmax_and_stats(
    scores: Float[Array, "*B T S"],
    sinks: Float[Array, "*#B #T"] | None = None,
    visible: Bool[Array, "*#B #T #S"] | None = None,
) -> tuple[Float[Array, "*B T S"], Stats]:
    """The masked softmax over the last axis, and its statistics; float32 or wider.

    Masked scores have zero weight and zero gradient, even if their gradient would be infinite.
    """
    scores = scores.astype(wide(scores.dtype))
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    m = jnp.max(scores, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)
        m = jnp.maximum(m, sinks)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0.0, m))
    powers = jnp.exp(at_most(scores, m[..., None]) - m[..., None])
    l = powers.sum(axis=-1)
    if sinks is not None:
        l = l + jnp.exp(sinks - m)
    weights = powers / jnp.where(l != 0, l, 1.0)[..., None]
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    return weights, Stats(m, l)


def weights_and_stats(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], rules: Rules
) -> tuple[Float[Array, "B N T S"], Stats]:
    """The weights before dropout and their statistics; head n uses key head n // G."""
    sizes = sizes_of(q, k)
    visible, static = None, static_visible(rules.mask, sizes)
    if not isinstance(rules.mask, Full):
        grid = None if static is None else static[0]
        visible = rules.mask.grid(sizes) if grid is None else grid[None, None]
    scores = modify_logits(rules.score, scaled_logits(q, k, rules.scale), visible, sizes)
    if listening():
        scores = tap("scores", scores if visible is None else jnp.where(visible, scores, -jnp.inf))
    sinks = None if rules.sinks is None else rules.sinks[None, :, None]  # 1 N 1
    return softmax_and_stats(scores, sinks, visible)


@partial(jax.jit, inline=True)  # eagerly one program
def scaled_logits(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], scale: Any
) -> Float[Array, "B N T S"]:
    """`scale * q.k` in float32 or wider; head n uses key head n // G."""
    sizes, kind = sizes_of(q, k), wide(q.dtype)
    groups = (k.shape[2], sizes.N // k.shape[2])  # K, G
    q = q.reshape(*q.shape[:2], *groups, q.shape[3])  # B T K G H
    logits = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=kind)
    return logits.reshape(q.shape[0], sizes.N, sizes.T, sizes.S) * jnp.asarray(scale, kind)


def modify_logits(score: Score, logits: jax.Array, visible: Any, sizes: Sizes) -> jax.Array:
    """Applies the score to the logits; masked logits, including NaN, do not reach gradients.

    Scores with derivative one need no special handling for this.
    """
    if isinstance(score, Identity):
        return logits
    if visible is None or isinstance(score, Additive | Alibi | T5Bias):
        return score.grid(logits, sizes)
    hidden = jax.lax.stop_gradient(zero_nonfinite_where_masked(False, logits))
    return _finite_where_hidden(score, visible).grid(jnp.where(visible, logits, hidden), sizes)


def _finite_where_hidden(score: Score, visible: Any) -> Score:
    if isinstance(score, Chain):
        return Chain(*(_finite_where_hidden(part, visible) for part in (score.first, score.then)))
    return (
        Additive(zero_nonfinite_where_masked(visible, score.array))
        if isinstance(score, Additive)
        else score
    )


def zero_nonfinite_where_masked(visible: Any, x: jax.Array) -> jax.Array:
    """Broadcasts x to `visible`, and replaces masked NaN and Inf by zeros."""
    return jnp.where(visible | jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def forward(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K h"], rules: Rules
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"]]:
    """The output, in the dtype of q, and the lse, in float32 or wider; rules are bound."""
    o, stats = attention(q, k, v, rules)
    return o, stats.lse


def attention(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K h"], rules: Rules
) -> tuple[Float[Array, "B T N h"], Stats]:
    """The output, in the dtype of q, and the softmax statistics; rules are bound."""
    q, k, v = zero_masked(q, k, v, rules)
    weights, stats = weights_and_stats(q, k, rules)
    hides = not (isinstance(rules.mask, Full) and isinstance(rules.score, Identity))
    dead = jnp.swapaxes((weights == 0).all(-1), 1, 2) if hides else None  # B T N
    weights = tap("weights", weights)
    if rules.dropout is not None:
        keep = jnp.broadcast_to(rules.dropout.grid(sizes_of(q, k)), weights.shape)
        weights = rules.dropout.apply(weights, tap("keep", keep))
    o = weighted_sum(weights, v).astype(q.dtype)
    if dead is not None:  # blocks cotangents, including NaN, of these rows
        o = jnp.where(dead[..., None], 0, o)
    return o, stats


@partial(jax.jit, inline=True)
def weighted_sum(
    weights: Float[Array, "B N T S"], v: Float[Array, "B S K h"]
) -> Float[Array, "B T N h"]:
    """`weights . v` in the dtype of the weights; head n uses value head n // G."""
    B, N, T, S = weights.shape
    weights = weights.reshape(B, v.shape[2], N // v.shape[2], T, S)  # B K G T S
    o = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(weights.dtype))
    return o.reshape(B, T, N, v.shape[3])


def zero_masked(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K h"], rules: Rules
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K h"]]:
    """Zeros fully masked queries, keys and values.

    NaN and Inf in them then reach neither outputs nor gradients.
    """
    sizes = sizes_of(q, k)
    if isinstance(rules.mask, Full):
        return q, k, v
    static = static_visible(rules.mask, sizes)
    if static is not None:
        sees, keys = (None if x is None else x[None, :, None, None] for x in static[1:])
        q = q if sees is None else jnp.where(sees, q, 0)
        k, v = (x if keys is None else jnp.where(keys, x, 0) for x in (k, v))
        return q, k, v
    visible = jnp.asarray(rules.mask.grid(sizes))
    visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)  # B|1 N|1 T|1 S|1
    sees = jnp.swapaxes(visible.any(axis=3), 1, 2)[..., None]  # B T N 1
    keys = visible.any(axis=2)  # B N S
    if keys.shape[1] > 1:
        groups = (k.shape[2], sizes.N // k.shape[2])  # K, G
        keys = keys.reshape(keys.shape[0], *groups, keys.shape[2]).any(axis=2)  # B K S
    keys = jnp.swapaxes(keys, 1, 2)[..., None]  # B S K 1
    return jnp.where(sees, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)


def static_visible(mask: Mask, sizes: Sizes) -> tuple[Any, Any, Any] | None:
    """A static mask, T S; queries that are not fully masked, T; and keys that are not, S.

    In numpy. None for another mask, and for large or open sizes; None instead of the mask for more
    than 2**16 pairs, and instead of queries and keys if none is fully masked.
    """
    if not mask.is_static or not all(isinstance(n, int) for n in sizes[1:]):
        return None
    return _evaluated(mask, sizes.T, sizes.S) if sizes.T * sizes.S <= 2**26 else None


@lru_cache(maxsize=64)
def _evaluated(mask: Mask, T: int, S: int) -> tuple[Any, Any, Any]:
    """Computed in numpy, since XLA would take seconds to constant-fold a mask of T x S."""
    sees, keys, blocks = np.zeros(T, bool), np.zeros(S, bool), []
    for start in range(0, T, 256):
        q = np.arange(start, min(start + 256, T), dtype=np.int32)[:, None]
        with jax.ensure_compile_time_eval():  # a user's class may compute in jax.numpy
            visible = np.asarray(mask(0, 0, q, np.arange(S, dtype=np.int32)[None]))
        visible = np.broadcast_to(visible, (len(q), S))
        sees[start : start + 256], keys = visible.any(1), keys | visible.any(0)
        blocks += [visible] if T * S <= 2**16 else []
    grid = np.concatenate(blocks) if blocks else None
    return grid, None if sees.all() else sees, None if keys.all() else keys
