"""Checks whether a cache can serve a mask, a score and a dropout."""

from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .._internal.types import Sizes
from ..masks import Mask
from ..masks.at_positions import at_positions, leaves_of
from ..masks.ranges import reach_of
from ..places import Positions, is_indexed_by_slot
from ..rules import Rules
from ..scores import Score
from ..token_layouts import partitioning
from .memory import Memory
from .paged import PagedCache
from .rows import counted
from .slots import Cache


def check_kind(cache: Any, x: Any = None) -> None:
    """Raises unless this is a self-attention cache of which no row's tokens are sharded.

    Its batch axes must be those of x, `*B T D`, if there is one.

    The sharding of a traced array over Auto axes is unknown: XLA would gather a sharded length.

    Raises:
      TypeError: for another cache, or none.
      ValueError: for one of another batch, or whose length is known to be sharded.
    """
    if isinstance(cache, Memory):
        raise TypeError(
            "A Memory is for cross attention; this call is self attention, and takes "
            "layer.init_cache(batch, length)."
        )
    if not isinstance(cache, Cache | PagedCache):
        raise TypeError(
            "cache must be a Cache or a PagedCache, such as layer.init_cache(batch, length); got "
            f"{type(cache).__name__}."
        )
    rows = cache.length.shape
    if x is not None and rows != x.shape[:-2]:
        need = x.shape[-3] if x.ndim == 3 else x.shape[:-2]
        raise ValueError(
            f"The cache is for a batch of {rows}, and x {x.shape} has a batch of {x.shape[:-2]}: "
            f"make one by layer.init_cache({need}, length)."
        )
    batch = len(rows)
    slots = "The length of the cache is sharded", "it"
    lengths = {  # the axes along which a row's tokens are stored
        "keys": {batch + 1: slots},
        "values": {batch + 1: slots},
        "positions": {batch: slots},
        **dict.fromkeys(("pool_keys", "pool_values"), _OF_POOL),
        "table": {batch: ("The table of pages is sharded along a row", "it")},
    }
    parts = ((x, n) for name, n in lengths.items() for x in jax.tree.leaves(vars(cache).get(name)))
    for x, axes in parts:
        traced = isinstance(x, Tracer)
        sharding: Any = jax.typeof(x).sharding if traced else getattr(x, "sharding", None)
        spec = (*getattr(sharding, "spec", ()), *[None] * x.ndim)
        for axis, (what, it) in axes.items():
            if spec[axis] is not None and partitioning(spec[axis], sharding.mesh):
                raise ValueError(
                    f"{what} over {spec[axis]!r}, and each step would gather {it}. {_whole(cache)}"
                )


_OF_POOL = {
    0: ("The pool of pages is sharded along its pages", "it, since a row may have any page"),
    2: ("The pages of the pool are sharded along their tokens", "them"),
}


def _whole(cache: Cache | PagedCache) -> str:
    """How a cache can be sharded."""
    if isinstance(cache, Cache):
        return "Shard its rows and heads, P(batch, heads), and leave the length whole."
    return (
        "Shard the pool along its heads, P(None, heads), and table, length and overflowed along "
        "their rows, P(batch)."
    )


def refuse_later(mask: Mask) -> NoReturn:
    """Raises ValueError for a layer's mask that shows tokens later ones."""
    raise ValueError(
        f"This layer's mask, {mask}, shows a token those that come after it, as in an encoder, "
        "and a cache does not hold them yet. Call it without a cache over all tokens. A mask= of "
        "the call counts before the layer's, for a layer that is meant to decode."
    )


def shows_unstored(
    mask: Mask, heads: int, q_positions: Int[Array, "*B T"], written: Cache | PagedCache
) -> Bool[Array, "*#B"]:
    """Rows in which the mask shows a token of a call keys that are stored after the call.

    Asked are the positions that follow, as many as the cache has slots. FULL and bands, which show
    later keys wherever a query stands, are taken to mean what is stored, and arrays go by slot.

    Args:
      heads: of the queries, N.
      q_positions: the positions of the call's tokens, -1 for padding.
      written: the cache with these tokens.

    Raises:
      ValueError: outside jit, if there are such rows.
    """
    known = mask.shows_later is not None or 0 in q_positions.shape
    if known or any(is_indexed_by_slot(part) for part in leaves_of(mask)):
        return jnp.zeros((1,) * written.length.ndim, bool)
    *batch, T = q_positions.shape
    next_ones = written.length[..., None] + counted(written.slots, len(batch))
    if written.window is None:  # no row is ever longer
        next_ones = jnp.where(next_ones < written.slots, next_ones, -1)
    sizes = Sizes(tuple(batch), heads, T, written.slots)
    shown = (
        at_positions(mask, Positions(q_positions, next_ones).bind(sizes)).bind(sizes).grid(sizes)
    )
    rows = jnp.broadcast_to(shown, (sizes.B, heads, T, written.slots)).any(axis=(1, 2, 3))
    if not isinstance(rows, Tracer) and rows.any():
        raise ValueError(
            f"The mask, {mask}, shows a token those that come after it, and this call ends before "
            "them, so that a cache does not hold them yet. Give in one call all tokens that it "
            "shows, such as a prefix or a chunk, or hide them: CAUSAL & mask."
        )
    return rows.reshape(batch)


def check_no_mean(empty: str) -> None:
    """Raises ValueError for empty="mean": a cache stores no mean of all values."""
    if empty != "zero":
        raise ValueError(
            f'empty={empty!r} cannot be had with a cache, which holds no mean; leave empty="zero".'
        )


def check_rules(cache: Any, rules: Rules) -> None:
    """Raises ValueError for a mask, score or dropout that this cache cannot serve."""
    mask = rules.mask
    for part in (*_parts(mask), *_parts(rules.score), rules.dropout):
        if isinstance(getattr(part, "offset", None), str):
            raise ValueError(
                'offset="end" beside a cache would count slots, not tokens; use CAUSAL or '
                "Causal(), which goes by the tokens' positions."
            )
        axes = "".join(getattr(part, "AXES", {}).values())
        if not cache.by_slot and ("q" in axes or "k" in axes):
            raise ValueError(
                f"{type(part).__name__} goes by slot, and in a ring or a paged cache no slot "
                "belongs to one token. Use a cache without window= and pages=, or a mask or score "
                "that goes by position, such as MaskFn or ScoreFn."
            )
    if cache.window is None:
        return
    back = reach_of(mask, cache.keep_first)
    if back is None or back > cache.window:
        looks = "any number of tokens" if back is None else f"{back} tokens"
        first = f", and the first {cache.keep_first}" if cache.keep_first else ""
        raise ValueError(
            f"The ring holds a window of {cache.window} tokens{first}, and the mask looks back "
            f"over {looks}. Narrow it, mask & Window({cache.window - 1}, 0), or make the cache "
            "with a larger window=."
        )


def _parts(node: Any) -> Iterator[Any]:
    """Yields a mask or a score and all its parts."""
    yield node
    for part in vars(node).values():
        if isinstance(part, Mask | Score):
            yield from _parts(part)
