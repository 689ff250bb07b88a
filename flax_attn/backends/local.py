"""Attention on one device: rules bound to its sizes, batch axes merged."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.arrays import unify_varying
from .._internal.types import Sizes, wide
from ..masks import FULL
from ..masks.at_positions import presence_in
from ..masks.ranges import as_known_band
from ..reference import Stats, static_visible, weights_and_stats, zero_masked
from ..rules import Rules, sizes_of
from ..scores import IDENTITY, Alibi, Chain, Identity, Score, Softcap
from ..taps import listen, listening, tap
from .protocol import visible_in_band


def flat(sizes: Sizes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Merges all batch axes: `*B T N H` to `B T N H`."""
    return tuple(x.reshape(sizes.B, *x.shape[len(sizes.batch) :]) for x in arrays)


def attend_locally(
    attention: Any, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, empty: str
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and statistics `*B N T` of a backend's `attention`, for bound rules."""
    sizes = sizes_of(q, k)
    if len(sizes.batch) != 1:
        q, k, v = flat(sizes, q, k, v)
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    o, stats = attention(q, k, v, rules)
    if empty == "mean":
        o = mean_where_empty(attention, q, k, v, rules, o, stats)
    o = tap("context", o)
    if len(sizes.batch) == 1:
        return o, stats
    parts = (x.reshape(*sizes.batch, *x.shape[1:]) for x in stats)
    return o.reshape(*sizes.batch, *o.shape[1:]), Stats(*parts)


def mean_where_empty(
    attention: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rules: Rules,
    o: jax.Array,
    stats: Stats,
) -> jax.Array:
    """`o` with the mean of v over all S keys in rows whose lse is -inf; any batch axes.

    The mean is the attention with equal logits. With dropout `attention` computes it that way, so
    that the same elements are dropped; with positions too, so that absent tokens are left out.
    """
    dead = jnp.swapaxes(stats.lse == -jnp.inf, -2, -1)[..., None]  # *B T N 1
    if rules.dropout is None and rules.positions is None:
        mean = _for_query_heads(jnp.mean(v, axis=-3, dtype=wide(v.dtype)), q.shape[-2])
    else:
        present = presence_in(rules.mask)  # unbound rules get this part of the mask when bound
        mask = FULL if present is None else present
        equal = replace(rules, mask=mask, score=IDENTITY, scale=1.0, sinks=None)
        # A listener records only the first attention. Without one, opening `listen` here would make
        # the backend materialise a T x S dropout mask.
        with listen(lambda name, value: None) if listening() else nullcontext():
            mean, _ = attention(jnp.zeros_like(q), jnp.zeros_like(k), v, equal)
    return jnp.where(*unify_varying((dead, mean.astype(o.dtype), o)))


def _for_query_heads(x: jax.Array, heads: int) -> jax.Array:
    """Repeats `*B K h` to `*B 1 N h`: query head n takes key head n // (N // K)."""
    *batch, K, width = x.shape
    x = jnp.broadcast_to(x[..., None, :], (*batch, K, heads // K, width))
    return x.reshape(*batch, 1, heads, width)


def no_row_is_empty(rules: Rules, sizes: Sizes) -> bool:
    """Whether bound rules show at trace time that no row is fully masked, or that S is 0."""
    if isinstance(sizes.S, int) and sizes.S == 0:
        return True
    known = all(isinstance(n, int) for n in (sizes.T, sizes.S))
    if not known or not _is_finite_score(rules.score):
        return False
    # Only static masks can tell; arrays may mask any row.
    band, sees = as_known_band(rules.mask), None
    if band is not None and all(x is None or isinstance(x, int) for x in (band.rows, band.kv)):
        sees = visible_in_band(band, sizes)[0]
    else:
        static = static_visible(rules.mask, sizes)
        sees = None if static is None else static[1] is None or static[1]
    return sees is not None and bool(np.all(sees))


def _is_finite_score(score: Score) -> bool:
    """Whether a score cannot produce -inf; a bias or a function may, and mask a whole row."""
    if isinstance(score, Chain):
        return _is_finite_score(score.first) and _is_finite_score(score.then)
    return isinstance(score, Identity | Softcap | Alibi)


def weights_locally(q: jax.Array, k: jax.Array, rules: Rules) -> jax.Array:
    """Attention weights `*B N T S` by the plain formula, for bound rules."""
    sizes = sizes_of(q, k)
    q, k = flat(sizes, q, k)
    q, k, _ = zero_masked(q, k, k, rules)
    return weights_and_stats(q, k, rules)[0].reshape(sizes.shape)
