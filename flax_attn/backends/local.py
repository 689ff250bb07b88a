"""One attention as one device sees it: rules bound to its sizes, batch axes taken as one."""

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
from ..reference import Stats, static_visible_rows_and_keys, weights_and_stats, zero_masked
from ..rules import Rules, sizes_of
from ..scores import IDENTITY, Alibi, Chain, Identity, Score, Softcap
from ..taps import listen, listening, tap
from .protocol import visible_in_band


def flat(sizes: Sizes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays with all batch axes as one: `*B T N H` as `B T N H`."""
    return tuple(x.reshape(sizes.B, *x.shape[len(sizes.batch) :]) for x in arrays)


def attend_locally(
    attention: Any, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, empty: str
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and the parts `*B N T` by a backend's `attention` and bound rules."""
    sizes = sizes_of(q, k)
    q, k, v = flat(sizes, q, k, v)
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    o, stats = attention(q, k, v, rules)
    if empty == "mean":
        o = mean_where_empty(attention, q, k, v, rules, o, stats)
    o = tap("context", o)
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

    The mean is the attention whose logits are all equal. `attention` computes it as such where
    there is dropout, so that the same elements are dropped, and at positions, so that what is
    absent stays out of it.
    """
    dead = jnp.swapaxes(stats.lse == -jnp.inf, -2, -1)[..., None]  # *B T N 1
    if rules.dropout is None and rules.positions is None:
        mean = _for_query_heads(jnp.mean(v, axis=-3, dtype=wide(v.dtype)), q.shape[-2])
    else:
        present = presence_in(rules.mask)  # rules that are not bound come by it when they are
        mask = FULL if present is None else present
        equal = replace(rules, mask=mask, score=IDENTITY, scale=1.0, sinks=None)
        # Who listens hears one attention; where nobody does, nothing of T x S is made to be heard.
        with listen(lambda name, value: None) if listening() else nullcontext():
            mean, _ = attention(jnp.zeros_like(q), jnp.zeros_like(k), v, equal)
    return jnp.where(*unify_varying((dead, mean.astype(o.dtype), o)))


def _for_query_heads(x: jax.Array, heads: int) -> jax.Array:
    """`*B K h` as `*B 1 N h`, query head n with what belongs to key head n // (N // K)."""
    *batch, K, width = x.shape
    x = jnp.broadcast_to(x[..., None, :], (*batch, K, heads // K, width))
    return x.reshape(*batch, 1, heads, width)


def no_row_is_empty(rules: Rules, sizes: Sizes) -> bool:
    """Whether no row can be empty, or none has values to average, as bound rules tell by now."""
    if isinstance(sizes.S, int) and sizes.S == 0:
        return True
    known = all(isinstance(n, int) for n in (sizes.T, sizes.S))
    if not known or not _is_finite_score(rules.score):
        return False
    band, sees = as_known_band(rules.mask), None
    if band is not None and all(x is None or isinstance(x, int) for x in (band.rows, band.kv)):
        sees = visible_in_band(band, sizes)[0]
    elif rules.mask.is_static:
        masked = static_visible_rows_and_keys(rules.mask, sizes._replace(batch=(), N=1))
        sees = None if masked is None else masked[0]
    return sees is not None and bool(np.all(sees))


def _is_finite_score(score: Score) -> bool:
    """Whether no logit can become -inf by a score; one with numbers of a user's may hide a row."""
    if isinstance(score, Chain):
        return _is_finite_score(score.first) and _is_finite_score(score.then)
    return isinstance(score, Identity | Softcap | Alibi)


def weights_locally(q: jax.Array, k: jax.Array, rules: Rules) -> jax.Array:
    """The weights `*B N T S` by the plain formula and bound rules."""
    sizes = sizes_of(q, k)
    q, k = flat(sizes, q, k)
    q, k, _ = zero_masked(q, k, k, rules)
    return weights_and_stats(q, k, rules)[0].reshape(sizes.shape)
