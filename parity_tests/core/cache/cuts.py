"""What the tests of caches share: random tokens, ways to cut them into calls, and the calls."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import attend, attend_cached
from flax_attn.cache import Cache, PagedCache
from flax_attn.parity import judge

T, N, K, H, h = 31, 4, 2, 3, 5
LENGTHS = (1, 2, 5, 9, 14, 31)
CUTS = (
    (31,),
    (1,) * 31,
    (14, 14, 2, 1),
    (9, 9, 9, 2, 2),
    (5, 5, 5, 5, 5, 5, 1),
    (2,) * 15 + (1,),
    (1, 5, 9, 14, 2),
    (14, *(1,) * 17),
    (9, 14, 5, 1, 2),
    (2, 14, 1, 9, 5),
    (5, 1, 9, 1, 14, 1),
    (1, 14, 1, 14, 1),
)


def tokens(batch: tuple[int, ...] = (3,), seed: int = 0, length: int = T) -> dict[str, jax.Array]:
    """Queries, keys and values in float64."""
    draw = np.random.default_rng(seed).normal
    widths = {"q": (N, H), "k": (K, H), "v": (K, h)}
    return {name: jnp.asarray(draw(size=(*batch, length, *w))) for name, w in widths.items()}


def empty(batch: tuple[int, ...] = (3,), length: int = T, **how: Any) -> Cache:
    """A cache for such tokens."""
    return Cache.empty(batch, length, K, H, h, **{"dtype": jnp.float64, **how})


def paged(page: int = 4) -> PagedCache:
    """Three rows with eight pages each, which lie in the pool in no order."""
    cache = PagedCache.empty(3, 8 * page, K, (26, page), H, h, dtype=jnp.float64)
    table = np.random.default_rng(2).permutation(26)[:24].reshape(3, 8)
    return replace(cache, table=jnp.asarray(table, jnp.int32))


def same(got: Any, want: Any) -> bool:
    """Equal but for rounding."""
    return judge.same_function(np.asarray(got), np.asarray(want)).ok


def pieces(x: jax.Array, cut: tuple[int, ...], axis: int = -3) -> Iterator[jax.Array]:
    """The parts of x in a cut."""
    return iter(jnp.split(x, np.cumsum(cut)[:-1], axis=axis))


def stepped(
    x: dict[str, Any], cache: Any, cut: tuple[int, ...], valid: Any = None, step: Any = None, **how
) -> tuple[jax.Array, Any]:
    """All outputs and the last cache, one call for each part."""
    step = partial(attend_cached, **how) if step is None else step
    parts = [pieces(x[name], cut) for name in "qkv"]
    there = [None] * len(cut) if valid is None else pieces(valid, cut, axis=-1)
    out = []
    for q, k, v, seen in zip(*parts, there, strict=True):
        o, cache = step(q, k, v, cache, valid=seen)
        out.append(o)
    return jnp.concatenate(out, axis=-3), cache


def jitted(**how: Any) -> Callable[..., Any]:
    """A step, compiled once for each number of tokens."""
    return jax.jit(lambda q, k, v, cache, valid: attend_cached(q, k, v, cache, valid=valid, **how))


def without_padding(x: dict[str, Any], valid: Any, **how: Any) -> np.ndarray:
    """Each row attended by itself without its padding, whose outputs are zero; one batch axis."""
    whole = np.zeros((*x["q"].shape[:-1], h))
    for row, there in enumerate(np.asarray(valid)):
        own = [x[name][row][there] for name in "qkv"]
        whole[row, there] = attend(*own, **how)
    return whole
