"""Attention of new tokens over a cache; returns the cache with these tokens stored."""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import checked_arguments, valid_tokens
from .._internal.types import frozen
from ..dropout import Drop
from ..masks import CAUSAL, FULL, Mask
from ..places import Positions
from ..quantized import Quantized
from ..rules import Rules, check_arrays, rules_of
from ..scores import IDENTITY, Score
from .by_slot import attend_by_slot
from .checks import check_kind, check_rules, shows_unstored
from .memory import Memory
from .meshes import sharded_like
from .paged import PagedCache
from .slots import Cache
from .stored import attend_over

C = TypeVar("C", Cache, PagedCache)
_Shape: Any = jax.ShapeDtypeStruct  # where only the shape is needed


@checked_arguments
def attend_cached(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B T K H"],
    v: Float[Array, "*B T K h"] | None,
    cache: C,
    *,
    mask: Mask | Array | None = CAUSAL,
    valid: Bool[Array, "*#B T"] | Mask | None = None,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout: Drop | None = None,
    backend: str = "auto",
) -> tuple[Float[Array, "*B T N h"], C]:
    """Stores keys and values of T tokens, then computes their attention over all stored tokens.

    Also called: attention with a KV cache, incremental decoding, prefill and decode.

    However the sequence is divided into calls, outputs equal those of one `attend` over all of it,
    if the cache keeps every token that the mask shows. Mask, score and dropout are evaluated at the
    tokens' positions, which count the stored tokens of a row from 0.

    Args:
      q, k, v: of the new tokens. Rotary embeddings are applied before, at the positions
        `cache.next_positions(T, valid)`. v is None for a latent cache.
      cache: a `Cache` or a `PagedCache`.
      mask: as of `attend`; None is FULL. A mask with an axis of S, such as a boolean array, is
        indexed by slot and needs a static cache. `Lengths` and `Prefix` count tokens.
      valid: True for non-padding tokens. Padding is neither stored nor visible, and its outputs
        are zero, so it may be anywhere.
      score, scale, sinks, dropout, backend: as of `attend`.

    Returns:
      The outputs, and the cache with these tokens. For a latent cache the values are the keys,
      h = H, and the caller slices the values out.

    Raises:
      ValueError: if shapes, heads or rows do not fit the cache; if the cache has no room, outside
        jit, before anything is written. Under jit nothing is overwritten, the outputs of that row
        are NaN from then on, and `cache.check()` raises. If the mask looks further back than a ring
        holds, or has `offset="end"`; outside jit, if it shows a query keys that come after the
        tokens of this call, such as `CAUSAL | Prefix(9)` before token 9. Under jit that row is NaN.
      TypeError: if the dtypes differ from the cache's, or it is no cache for self attention.

    Source: Pope et al., "Efficiently Scaling Transformer Inference", 2022.

    >>> from flax_attn import Cache, attend, attend_cached
    >>> x, step = jax.random.normal(jax.random.key(0), (2, 6, 3, 4)), jax.jit(attend_cached)
    >>> one, cache = step(*3 * [x[:, :4]], Cache.empty(2, 6, 3, 4))
    >>> two, cache = step(*3 * [x[:, 4:]], cache)
    >>> whole = attend(x, x, x, mask=CAUSAL)
    >>> bool(jnp.allclose(jnp.concatenate([one, two], 1), whole, atol=1e-6))
    True
    """
    check_kind(cache)
    q, k = jnp.asarray(q), jnp.asarray(k)
    v = None if v is None else jnp.asarray(v)
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"q and k must be of the same new tokens; got q {q.shape}, k {k.shape}.")
    _check_heads(q, k, k if v is None else v, cache)
    rules = rules_of(mask=mask, score=score, scale=scale, sinks=sinks, dropout=dropout)
    return attend_cached_by_rules(q, k, v, cache, rules, valid, backend)


def attend_cached_by_rules(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B T K H"],
    v: Float[Array, "*B T K h"] | None,
    cache: C,
    rules: Rules,
    valid: Bool[Array, "*#B T"] | Mask | None,
    backend: str = "auto",
) -> tuple[Float[Array, "*B T N h"], C]:
    """`attend_cached` for layers, which have checked their mask and score."""
    check_rules(cache, rules)
    if q.dtype != k.dtype:  # as by a norm of a layer's queries alone
        _check_heads(q, k, k if v is None else v, cache)
    stored = store(k, v, cache, valid)
    return attend_stored(q, stored, rules, backend), stored.cache


@frozen
class Stored:
    """What a call with a cache attends over, for its own queries and for layers that share it.

    Attributes:
      keys, values: `*B K S H` and `*B K S h`, or `Quantized`. For a ring they end with the call's
        tokens, since some of these may replace tokens that others of them see.
      positions: `*B S`, of the keys, -1 where there is none.
      q_positions: `*B T`, the positions of the call's tokens, -1 for padding.
      cache: with the call's tokens.
      is_padded: whether the call has padding, as far as is known while it is traced.
    """

    keys: Any
    values: Any
    positions: Any
    q_positions: Any
    cache: Any
    is_padded: bool = True

    def next_positions(self, T: int, valid: Bool[Array, "*#B T"] | Mask | None = None) -> Array:
        """Positions of the T tokens of the call, -1 for its padding and where not `valid`."""
        tokens = self.q_positions.shape[-1]
        if tokens != T:
            raise ValueError(f"keys_and_values are of a call with {tokens} tokens; x has {T}.")
        return jnp.where(valid_tokens("valid", valid, self.q_positions.shape), self.q_positions, -1)


def store(
    k: Float[Array, "*B T K H"],
    v: Float[Array, "*B T K h"] | None,
    cache: Cache | PagedCache,
    valid: Bool[Array, "*#B T"] | Mask | None,
) -> Stored:
    """Stores the keys and values of T tokens; arguments and errors as of `attend_cached`."""
    _check_fit(k, v, cache)
    T = k.shape[-3]
    q_positions = cache.next_positions(T, valid)
    written = cache.append(k, v, q_positions)
    if cache.holds_beside(T):
        keys, values, positions = written.read()
    else:
        keys, values, positions = _concat_ring(cache, k, v, q_positions)
    return Stored(keys, values, positions, q_positions, written, valid is not None)


def attend_stored(
    q: Float[Array, "*B T N H"], stored: Stored, rules: Rules, backend: str = "auto"
) -> Float[Array, "*B T N h"]:
    """Attention of a call's queries over `stored`, whose cache can serve the rules."""
    cache, q_positions = stored.cache, stored.q_positions
    o = attend_by_slot(q, stored, rules, backend)
    unknown = cache.overflowed | shows_unstored(rules.mask, q.shape[-2], q_positions, cache)
    return jnp.where(unknown[..., None, None, None], jnp.nan, o)


@checked_arguments
def attend_memory(
    q: Float[Array, "*B T N H"],
    memory: Memory,
    *,
    mask: Mask | Array | None = FULL,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    dropout: Drop | None = None,
    q_positions: Int[Array, "*#B T"] | None = None,
    backend: str = "auto",
) -> Float[Array, "*B T N h"]:
    """Attention over a memory: `attend(q, k, v)` with the k and v of `Memory.of(k, v, valid)`.

    Also called: cross-attention with a KV cache.

    Args:
      q: queries.
      memory: keys and values; positions count its non-padding tokens.
      q_positions: positions of the queries; None means 0, 1, 2, ...
      mask, score, scale, dropout, backend: as of `attend`.

    Raises:
      ValueError, TypeError: as `attend` does.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3.

    >>> memory = Memory.of(jnp.ones((7, 3, 4)), jnp.ones((7, 3, 5)))
    >>> attend_memory(jnp.ones((1, 3, 4)), memory).shape
    (1, 3, 5)
    """
    rules = rules_of(mask=mask, score=score, scale=scale, dropout=dropout)
    rules = replace(rules, positions=Positions(q_positions, memory.positions))
    return attend_over(jnp.asarray(q), memory.keys, memory.values, rules, backend, check=True)


def _check_heads(q: Any, k: Any, v: Any, cache: Cache | PagedCache) -> None:
    """Raises TypeError or ValueError unless q fits k and v, as this cache stores them."""
    dtypes = (x.dtype if cache.store is None else q.dtype for x in (k, v))
    k, v = (
        _Shape((*x.shape[:-3], cache.slots, *x.shape[-2:]), dtype)
        for x, dtype in zip((k, v), dtypes, strict=True)
    )
    check_arrays(q=q, k=k, v=v)


def _concat_ring(cache: Any, k: Any, v: Any, q_positions: jax.Array) -> tuple[Any, Any, jax.Array]:
    """A ring's contents followed by new tokens, some of which would overwrite visible ones."""
    *old, positions = cache.read()
    new = [k] if v is None else [k, v]
    if cache.store is not None:  # so that a token has the same values for every query
        new = [cache.store.quantize(x) for x in new]
    current = []
    for a, b in zip(old, new, strict=False):
        stored, added = _plain(a, k.dtype), jnp.swapaxes(_plain(b, k.dtype), -3, -2)
        current.append(jnp.concatenate([stored, sharded_like(added, stored)], axis=-2))
    at = jnp.concatenate([positions, sharded_like(q_positions, positions)], axis=-1)
    return current[0], current[-1], at


def _plain(x: Any, dtype: Any) -> jax.Array:
    return x.dequantized(dtype) if isinstance(x, Quantized) else x


def _check_fit(k: Any, v: Any, cache: Any) -> None:
    if v is not None and k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"k and v must be of the same new tokens; got k {k.shape}, v {v.shape}.")
    is_paged = isinstance(cache, PagedCache)  # which gathers what it reads
    keys, values, _ = jax.eval_shape(PagedCache.read, cache) if is_paged else cache.read()
    if cache.latent != (v is None):
        raise ValueError(
            "A latent cache stores keys alone, and any other one values too; got "
            f"{'values' if cache.latent else 'v=None'}. Make the cache with the layer's own "
            "init_cache."
        )
    for name, x, cached in (("k", k, keys), ("v", k if v is None else v, values)):
        wanted = (*cached.shape[:-3], cached.shape[-3], cached.shape[-1])
        if (*x.shape[:-3], *x.shape[-2:]) != wanted:
            raise ValueError(
                f"The cache holds {'keys' if name == 'k' else 'values'} of rows {wanted[:-2]}, "
                f"{wanted[-2]} heads and width {wanted[-1]}; got {name} {x.shape}. Each layer "
                "has a cache of its own: layer.init_cache(batch, length)."
            )
        if cache.store is None and x.dtype != cached.dtype:
            raise TypeError(
                f"The cache holds {cached.dtype}, and {name} is {x.dtype}. Make the cache with "
                f"dtype={x.dtype}, or cast what is stored."
            )
