"""One attention as one device sees it: rules bound to its sizes, batch axes taken as one."""

from typing import Any

import jax

from .._types import Sizes
from ..places import Places
from ..reference import Stats, weights_and_stats, zero_unseen
from ..rules import Rules, sizes_of
from ..taps import tap


def bound(q: jax.Array, k: jax.Array, rules: Rules, places: Places | None = None) -> Rules:
    """The rules for these sizes; `places` tells where a shard stands in the whole."""
    sizes = sizes_of(q, k)
    if places is not None:
        rules = rules.at(places.bind(sizes))
    return rules.bind(sizes, q.shape[-1])


def flat(sizes: Sizes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays with all batch axes as one: `*B T N H` as `B T N H`."""
    return tuple(x.reshape(sizes.B, *x.shape[len(sizes.batch) :]) for x in arrays)


def attend_locally(
    attention: Any, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and the parts `*B N T` by a backend's `attention` and bound rules."""
    sizes = sizes_of(q, k)
    q, k, v = flat(sizes, q, k, v)
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    o, stats = attention(q, k, v, rules)
    o = tap("context", o)
    parts = (x.reshape(*sizes.batch, *x.shape[1:]) for x in stats)
    return o.reshape(*sizes.batch, *o.shape[1:]), Stats(*parts)


def weights_locally(q: jax.Array, k: jax.Array, rules: Rules) -> jax.Array:
    """The weights `*B N T S` by the plain formula and bound rules."""
    sizes = sizes_of(q, k)
    q, k = flat(sizes, q, k)
    q, k, _ = zero_unseen(q, k, k, rules)
    return weights_and_stats(q, k, rules)[0].reshape(sizes.shape)
