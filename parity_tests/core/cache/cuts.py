"""What the tests of caches share: random tokens, ways to cut them into calls, and the calls.

Tokens are numpy arrays and steps are compiled, since each operation of its own is a program too.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import attend, attend_cached
from flax_attn.cache import Cache, PagedCache
from flax_attn.parity import judge

T, N, K, H, h = 31, 4, 2, 3, 5
CUTS = (  # of few sizes, since each is compiled
    (31,),
    (1,) * 31,
    (14, 14, 1, 1, 1),
    (5, 5, 5, 5, 5, 5, 1),
    (1, 5, 5, 14, 5, 1),
    (14, *(1,) * 17),
    (5, 14, 5, 1, 5, 1),
    (5, 1, 5, 1, 5, 14),
    (1, 14, 1, 14, 1),
)


def tokens(batch: tuple[int, ...] = (3,), seed: int = 0, length: int = T) -> dict[str, np.ndarray]:
    """Queries, keys and values in float64."""
    draw = np.random.default_rng(seed).normal
    widths = {"q": (N, H), "k": (K, H), "v": (K, h)}
    return {name: draw(size=(*batch, length, *w)) for name, w in widths.items()}


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


def whole(x: dict[str, Any], **how: Any) -> jax.Array:
    """One call over all tokens."""
    return jax.jit(lambda q, k, v: attend(q, k, v, **how))(*x.values())


def pieces(x: Any, cut: tuple[int, ...], axis: int = -3) -> Iterator[Any]:
    """The parts of x in a cut."""
    return iter(_numpy_of(x).split(x, np.cumsum(cut)[:-1], axis=axis))


def joined(parts: list[Any], axis: int = -3) -> Any:
    """The parts one after the other."""
    return _numpy_of(parts[0]).concatenate(parts, axis=axis)


def _numpy_of(x: Any) -> Any:
    """numpy, or that of jax while x is traced."""
    return jnp if isinstance(x, jax.core.Tracer) else np


def stepped(
    x: dict[str, Any], cache: Any, cut: tuple[int, ...], valid: Any = None, step: Any = None, **how
) -> tuple[jax.Array, Any]:
    """All outputs and the last cache, one call for each part; compiled, unless `step` is not."""
    step = jitted(**how) if step is None else step
    parts = [pieces(x[name], cut) for name in "qkv"]
    there = [None] * len(cut) if valid is None else pieces(valid, cut, axis=-1)
    out = []
    for q, k, v, seen in zip(*parts, there, strict=True):
        o, cache = step(q, k, v, cache, valid=seen)
        out.append(o)
    return joined(out), cache


def jitted(**how: Any) -> Callable[..., Any]:
    """A step, compiled once for each number of tokens."""
    return jax.jit(lambda q, k, v, cache, valid: attend_cached(q, k, v, cache, valid=valid, **how))


def without_padding(x: dict[str, Any], valid: Any, **how: Any) -> np.ndarray:
    """Each row attended by itself without its padding, whose outputs are zero; one batch axis."""
    found = np.zeros((*x["q"].shape[:-1], h))
    for row, there in enumerate(np.asarray(valid)):
        found[row, there] = whole({name: x[name][row][there] for name in "qkv"}, **how)
    return found
