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
from ..attend import choice, dispatch, requested_backend
from ..backends import blockwise
from ..backends.blockwise.plan import make_plan
from ..backends.hoist import hoist
from ..backends.local import flat
from ..backends.protocol import is_decode_step
from ..places import Places
from ..quantized import Quantized
from ..reference import Stats
from ..rules import Request, Rules, bind_rules, check_arrays, sizes_of
from ..taps import listening
from ..where import mesh_of, platform_of

Stored = Any  # Quantized, or an array
_Shape: Any = jax.ShapeDtypeStruct  # where only the shape is needed


def attend_over(
    q: jax.Array, keys: Any, values: Any, rules: Rules, backend: str, check: bool = False
) -> Float[Array, "*B T N h"]:
    """Attention over stored keys and values, `*B K S H`, read in place where possible.

    That is for eight-bit storage, and in decoding where the blockwise backend is best. `check` is
    for queries that have not been checked against the keys.

    Raises:
      ValueError, TypeError, NotImplementedError: as `attend` does.
    """
    if isinstance(keys, Quantized):
        in_blocks = requested_backend(backend) in ("auto", "blockwise") and not listening()
        if in_blocks and mesh_of(q).size <= 1:
            return attention(q, keys, values, rules)[0]
        keys, values = (x.dequantized(q.dtype) for x in (keys, values))
    k, v = (  # *B S K H
        _Shape((*x.shape[:-3], x.shape[-2], x.shape[-3], x.shape[-1]), x.dtype)
        for x in (keys, values)
    )
    if check:
        check_arrays(q=q, k=k, v=v)
    # The sizes are those of k and v; what is stored says where it lies.
    where, request = Request(q, keys, values, rules).where, Request(q, k, v, rules)
    same_dtypes = q.dtype == k.dtype == v.dtype and isinstance(k.shape[-3], int)
    if same_dtypes and where.axes is None and is_decode_step(sizes_of(q, k), k.shape[-2]):
        if choice(request, backend) == "blockwise":
            return attention(q, keys, values, rules)[0]
    keys, values = (jnp.swapaxes(x, -3, -2) for x in (keys, values))  # *B S K H
    return dispatch(Request(q, keys, values, rules), backend, "zero")[0]


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
