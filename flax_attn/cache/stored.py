"""Attention to keys and values in a cache's layout, `*B K S H`, also quantised to eight bits.

In decoding they are read in place. For eight-bit keys and values, the scale of k multiplies the
logits and that of v the weights, so that only eight bits a number are read; the backward pass
dequantises them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._internal.arrays import unify_varying
from .._internal.types import wide
from ..backends import blockwise
from ..backends.blockwise.plan import make_plan
from ..backends.hoist import hoist
from ..backends.local import flat
from ..backends.protocol import is_decode_step
from ..places import Places
from ..quantized import Quantized
from ..reference import Stats
from ..rules import Rules, bind_rules, sizes_of
from ..where import platform_of

Stored = Any  # Quantized, or an array


def attention(
    q: Float[Array, "*B T N H"],
    keys: Stored,
    values: Stored,
    rules: Rules,
    places: Places | None = None,
) -> tuple[Float[Array, "*B T N h"], Stats]:
    """Output in the dtype of q, and softmax statistics, `*B N T`.

    Args:
      q: queries; any number of batch axes.
      keys, values: `*B K S H` and `*B K S h`, both arrays in the dtype of q or both `Quantized`.
      rules: not bound.
      places: inside a `jax.shard_map`, the global indices of this shard.

    Gradients reach q, the rules, and keys and values that are arrays; `Quantized` ones are
    constants. If more than 64 queries share a key head, they are dequantised first.

    Raises:
      ValueError: if the shapes do not fit.
      TypeError: if keys and values are not stored alike.
    """
    _check(q, keys, values)
    B, (K, S, H) = keys.shape[:-3], keys.shape[-3:]
    like: Any = jax.ShapeDtypeStruct((*B, S, K, H), q.dtype)
    sizes, rules = sizes_of(q, like), bind_rules(q, like, rules, places)
    (q,) = flat(sizes, q)
    keys, values = jax.tree.map(lambda x: flat(sizes, x)[0], (keys, values))
    few = is_decode_step(sizes, K) and 0 not in (*q.shape, *keys.shape)
    o, stats = (_as_stored if few else _as_attended)(q, keys, values, rules)
    parts = (x.reshape(*B, *x.shape[1:]) for x in stats)
    return o.reshape(*B, *o.shape[1:]), Stats(*parts)


def _check(q: jax.Array, keys: Stored, values: Stored) -> None:
    shapes = f"q {q.shape}, keys {keys.shape}, values {values.shape}"
    if isinstance(keys, Quantized) != isinstance(values, Quantized):
        kinds = f"{type(keys).__name__} and {type(values).__name__}"
        raise TypeError(f"keys and values must both be Quantized or both be arrays; got {kinds}.")
    fits = q.ndim >= 3 and len(keys.shape) == q.ndim and keys.shape[:-1] == values.shape[:-1]
    if not fits or q.shape[:-3] != keys.shape[:-3] or q.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"Stored keys and values lie as *B K S H beside q, *B T N H; got {shapes}."
        )
    if keys.shape[-3] == 0 or q.shape[-2] % keys.shape[-3]:
        raise ValueError(f"The key/value heads must divide the query heads; got {shapes}.")


def _as_attended(q: jax.Array, keys: Stored, values: Stored, rules: Rules) -> Any:
    """Transposes and dequantises; no gradient reaches quantised arrays."""
    if isinstance(keys, Quantized):
        keys, values = (jax.lax.stop_gradient(x).dequantized(q.dtype) for x in (keys, values))
    k, v = (jnp.swapaxes(x, 1, 2) for x in (keys, values))
    return blockwise.attention(q, k, v, rules)


def _as_stored(q: jax.Array, keys: Stored, values: Stored, rules: Rules) -> Any:
    B, K, S, H = keys.shape
    like: Any = jax.ShapeDtypeStruct((B, S, K, H), q.dtype)
    plan = make_plan(sizes_of(q, like), K, rules, platform_of(q))._replace(layout="heads first")
    if isinstance(keys, Quantized):
        keys, values = jax.lax.stop_gradient((keys, values))
    q, keys, values, rules = unify_varying((q, keys, values, rules))
    axes = jax.typeof(q).manual_axis_type.varying
    return blockwise.run(plan, *unify_varying((q, keys, values, hoist(rules, wide(q.dtype), axes))))
