"""Communication of each context-parallel strategy, inside a `jax.shard_map`.

all_gather   every device has its queries, and all keys and values
ulysses      every device has its heads, of all queries, keys and values
ring         every device has its queries, and one shard of keys and values after the other
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._internal.types import leaf_axes
from ..backends.local import mean_where_empty
from ..places import Places
from ..reference import Stats
from ..rules import Rules, bind_rules
from ..token_layouts import place, unplace
from .ring import ring
from .sequence import Sequence
from .specs import check_spread, letters

GATHERED = {"all_gather": "k", "ulysses": "qk"}  # lengths that each device has in full


def run(sequence: Sequence, task: Any, q, k, v, rules: Rules, places: Places) -> Any:
    """A `task` for one device's queries; `rules` are its own part and not bound."""
    if not sequence.swapped:
        return _run_on_heads(sequence, task, q, k, v, rules, places)
    # Ulysses: exchange the length for heads, attend, and exchange back.
    times = check_spread(q.shape[-2], k.shape[-2], sequence.groups)
    k, v = (x if times == 1 else jnp.repeat(x, times, axis=-2) for x in (k, v))
    q, k, v = (_all_to_all_heads(sequence, x) for x in (q, k, v))
    o, stats = _run_on_heads(sequence, task, q, k, v, rules, places)
    o = _all_to_all_length(sequence, o, o.ndim - 3, o.ndim - 2)
    return o, Stats(*(_all_to_all_length(sequence, x, x.ndim - 1, x.ndim - 2) for x in stats))


def _run_on_heads(sequence: Sequence, task: Any, q, k, v, rules: Rules, places: Places) -> Any:
    """The task for the heads that this device holds after a possible exchange."""
    if sequence.strategy == "ring":
        o, stats = ring(sequence, places, q, k, v, rules)
        if task.empty == "mean":
            # The mean is over all keys, also those that the mask hides.
            whole = _ring_attention(sequence.without_window, places)
            o = mean_where_empty(whole, q, k, v, rules, o, stats)
        return o, stats
    if sequence.strategy == "all_gather":
        k, v = (_all_gather(sequence, x) for x in (k, v))
    # Gathered arrays are put into token order; results go back into the order of the slots.
    rules = _to_token_order(sequence, rules, q.ndim - 3)
    whole = GATHERED[sequence.strategy]
    q, k, v = (
        unplace(x, sequence.shards, sequence.layout, axis=x.ndim - 3) if axis in whole else x
        for axis, x in zip("qkk", (q, k, v), strict=True)
    )
    outputs = task(q, k, v, bind_rules(q, k, rules, places))
    if "q" not in whole:
        return outputs
    o, (m, l) = outputs
    m, l = (place(x, sequence.shards, sequence.layout, axis=x.ndim - 1) for x in (m, l))
    return place(o, sequence.shards, sequence.layout, axis=o.ndim - 3), Stats(m, l)


def _ring_attention(sequence: Sequence, places: Places) -> Any:
    def attention(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> tuple[Any, Stats]:
        return ring(sequence, places, q, k, v, rules)

    return attention


def _all_gather(sequence: Sequence, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, sequence.axis, axis=x.ndim - 3, tiled=True)


def _all_to_all_heads(sequence: Sequence, x: jax.Array) -> jax.Array:
    """Exchanges all heads of this device's tokens for some heads of more tokens."""
    return jax.lax.all_to_all(x, sequence.swapped, x.ndim - 2, x.ndim - 3, tiled=True)


def _all_to_all_length(sequence: Sequence, x: jax.Array, length: int, heads: int) -> jax.Array:
    return jax.lax.all_to_all(x, sequence.swapped, length, heads, tiled=True)


def _to_token_order(sequence: Sequence, rules: Rules, batch: int) -> Rules:
    """Rules whose arrays along a gathered length are in token order."""
    leaves, structure = jax.tree.flatten(rules)
    for i, axes in enumerate(leaf_axes(rules)):
        for axis, letter in enumerate(letters(axes, leaves[i].ndim, batch)):
            if letter and letter in GATHERED[sequence.strategy] and leaves[i].shape[axis] > 1:
                leaves[i] = unplace(leaves[i], sequence.shards, sequence.layout, axis=axis)
    return structure.unflatten(leaves)
