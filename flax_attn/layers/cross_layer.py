"""Cross-layer attention: reuses the keys and values of an earlier layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Unpack, overload

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from .._internal.checks import check_input
from .._internal.types import frozen
from ..cache.attention import Stored
from ..cache.checks import check_kind
from ..cache.rows import first_row
from ._cached import AnyCache, C, Call
from ._common import split_heads
from ._init import keywords_of
from ._self_attention import DecodingHeads, NormFn, SelfAttention


@frozen
class KeysAndValues:
    """Keys and values of a layer's tokens, for later layers; iterates over the two.

    Attributes:
      k, v: `*B T K H`.
      positions: `*B T`, those in the cache beside which they were made, -1 for padding; None
        without a cache.
      stored: all that the layer attended over in its call with a cache; None without one.
    """

    k: Any
    v: Any
    positions: Any = None
    stored: Stored | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.k, self.v))


Pair = tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]] | KeysAndValues


class CrossLayerAttention(DecodingHeads):
    """`o_proj(attend(rotary(q_norm(q_proj(x))), k, v))`, k and v computed by an earlier layer.

    Also called: cross-layer attention (CLA), shared KV cache, KV sharing between layers.

    There is no `k_proj` and no `v_proj`. The earlier layer is a `SharedKeyValueAttention`, called
    by `y, cache, shared = earlier.with_keys_and_values(x, cache=cache)`, where x is its own input,
    with the same `mask`, `positions` and `valid` as this layer's call. This layer then attends over
    the same keys, and has no cache: `y = later(x, keys_and_values=shared)`.

    Shapes: x `*B T in_features`, keys and values `*B T K H` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      grouped: the keywords of `GroupedQueryAttention`, except `k_norm`, `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, and for a k_norm; in the call, if keys or values
        are not `*B T K H`, or known not to be of the tokens that a cache stores next.
      TypeError: as in `GroupedQueryAttention`, and in the call without keys and values.

    Source: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    2024; names as in Gemma 3n's published checkpoints.

    >>> from flax import nnx
    >>> from flax_attn import SharedKeyValueAttention
    >>> first = SharedKeyValueAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> later = CrossLayerAttention(12, 6, 3, 4, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((2, 5, 12))
    >>> y, cache, shared = first.with_keys_and_values(x, cache=first.init_cache(2, 8))
    >>> later(x + y, keys_and_values=shared).shape
    (2, 5, 12)
    """

    kv_projections = ()

    def refuse(self, k_norm: NormFn | None, sinks: bool) -> None:
        """Raises ValueError for a norm of keys, which this layer does not compute."""
        if k_norm is not None:
            raise ValueError(
                "CrossLayerAttention reads keys that another layer has normed; leave k_norm out."
            )

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        keys_and_values: Pair,
        cache: None = None,
        **call: Unpack[Call],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, keys_and_values: Pair, cache: C, **call: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    @keywords_of(SelfAttention.__call__)
    def __call__(self, x: Float[Array, "*B T D"], *, keys_and_values: Pair, **call: Any) -> Any:
        """Attention of x over an earlier layer's `keys_and_values` of the same tokens.

        The other arguments are as in `GroupedQueryAttention`. A cache is needed only where the
        earlier layer has none: it stores keys and values that the caller has made at their
        positions, such as `earlier.keys_and_values_of(x, cache=cache)`.
        """
        shared, call = self.resolved(keys_and_values, x, call)
        tokens = self.tokens(x, **call)  # *B T D
        real = jnp.asarray(True) if tokens.real is None else tokens.real[..., None, None]
        k, v = (jnp.where(real, part, 0) for part in shared)  # *B T K H, zeros at padding
        q = split_heads(self.q_proj(tokens.x), self.head_dim)  # *B T N H
        q = self.norm_and_rotate(q, self.q_norm, tokens.positions)
        o, cache = self.attention(q, k, v, tokens)  # *B T N H
        y = self.output(o, tokens)  # *B T D
        return y if cache is None else (y, cache)

    def resolved(
        self, shared: Pair, x: Array, call: dict[str, Any]
    ) -> tuple[KeysAndValues, dict[str, Any]]:
        """Keys and values, NaN in rows where they are misplaced, and the arguments of `tokens`.

        What the earlier layer has stored takes the place of a cache.
        """
        shared = shared if isinstance(shared, KeysAndValues) else KeysAndValues(*shared)
        self.check_shared_kv(shared, check_input("x", x, self.q_proj.in_features))
        cache, stored, valid = call.get("cache"), shared.stored, call.get("valid")
        if cache is not None:
            check_kind(cache, x)
            rows = self.misplaced(shared, x, call.get("positions"), cache, valid)  # *B
            k = jnp.where(rows[..., None, None, None], jnp.nan, shared.k)  # *B T K H
            return replace(shared, k=k), call
        if stored is not None:
            real = stored.next_positions(x.shape[-2], valid) >= 0
            return shared, {**call, "cache": stored, "valid": real}
        if shared.positions is not None:
            raise ValueError(
                "keys_and_values_of(x, cache=) returns keys of new tokens alone, for a cache of "
                "this layer; without one pass what earlier.with_keys_and_values returns."
            )
        return shared, call

    def misplaced(
        self, shared: KeysAndValues, x: Array, positions: Any, cache: AnyCache, valid: Any
    ) -> Bool[Array, "*B"]:
        """Rows of a cache whose keys were made at other positions than their own.

        Raises:
          ValueError: outside jit, if there are such rows.
        """
        if shared.positions is not None:
            rows = (shared.positions != cache.next_positions(x.shape[-2], valid)).any(axis=-1)
        elif positions is None and self.rotary is not None:
            rows = cache.length > 0
        else:
            return jnp.zeros(cache.length.shape, bool)
        if not isinstance(rows, Tracer) and rows.any():
            raise ValueError(
                f"Row {first_row(rows)} of the cache stores other tokens next than those that "
                "keys_and_values were made for, which count from 0 without a cache. Make them by "
                "earlier.keys_and_values_of(x, cache=cache), or pass both calls positions=; or "
                "leave cache out and pass on what earlier.with_keys_and_values(x, cache=) returns."
            )
        return rows

    def check_shared_kv(self, shared: KeysAndValues, x: Float[Array, "*B T D"]) -> None:
        """Raises unless keys and values are floating and have the shape that the tokens ask for."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        if any(jnp.shape(part) != shape for part in shared):
            shapes = ", ".join(str(jnp.shape(part)) for part in shared)
            raise ValueError(f"keys_and_values must be two of *B T K H = {shape}; got {shapes}.")
        for part in shared:
            check_input("keys_and_values", part)
