"""Decoding on eight devices, rows over two and heads over four: one line of JSON for each case.

Each cache is tried on axes of one kind, or with `--more` on axes of both; its methods on Explicit
axes, with `--more` for every kind of cache, in every way to shard it and outside jit too.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import CAUSAL, Cache, Float8, Int8, PagedCache, Window, attend_cached

SIZES = {"q": 8, "k": 4, "v": 4}  # heads
MADE = {
    "static": {"length": 2048},
    "ring": {"length": 4096, "window": 1500},
    "eight bits": {"length": 2048, "store": Int8()},
    "few": {"length": 40},
}
KINDS = ("Explicit", "Auto")
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def tokens(length: int, seed: int) -> list[jax.Array]:
    draw = np.random.default_rng(seed).normal
    return [jnp.asarray(draw(size=(4, length, n, 16)), jnp.float32) for n in SIZES.values()]


def rows(more: bool) -> Iterator[dict[str, Any]]:
    """Whether a step equals that on one device, and the collectives in its program."""
    mask = CAUSAL & Window(1499, 0)
    for i, (name, made) in enumerate(MADE.items()):
        cache = Cache.empty(4, num_kv_heads=4, head_dim=16, **made)
        _, cache = attend_cached(*tokens(30, 0), cache, mask=mask)
        x = tokens(1, 1)
        want, after = attend_cached(*x, cache, mask=mask)
        for kind in KINDS if more else [KINDS[i % 2]]:
            axes = (getattr(jax.sharding.AxisType, kind),) * 2
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axes)
            with jax.set_mesh(mesh):
                got, new, found = on_eight(x, cache, mask)
            kept = tuple(got.sharding.spec)[:3] == ("data", None, "model")
            error = float(np.abs(np.asarray(got) - np.asarray(want)).max())
            alike = bool((np.asarray(new.positions) == np.asarray(after.positions)).all())
            same = alike and error < 1e-6 * float(np.abs(want).max())
            yield {"axes": kind, "name": name, "same": same, "kept": kept, "found": found}


def sharded_lengths(kind: str) -> dict[str, Any]:
    """What caches say of a length that is sharded, and whether a step serves that cannot see it."""
    axes = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=axes)
    cache = Cache.empty(4, 40, num_kv_heads=4, head_dim=16)
    caches = {
        "keys": cache,
        "eight bits": Cache.empty(4, 40, num_kv_heads=4, head_dim=16, store=Int8()),
        "pages": PagedCache.empty(4, 40, 4, (8, 4), 16),
    }
    x = tokens(1, 1)

    def step(x: list[jax.Array], cache: Any) -> jax.Array:
        return attend_cached(*x, cache)[0]

    def put(x: jax.Array, *spec: Any) -> jax.Array:
        spec = (spec or (None, None, "seq")) if x.ndim == 4 else ()
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    cut = {name: jax.tree.map(put, cache) for name, cache in caches.items()}
    cut["pool"] = jax.tree.map(lambda x: put(x, "seq"), caches["pages"])
    said = {name: [sentence(f, x, cut[name]) for f in (step, jax.jit(step))] for name in cut}
    error = 0.0
    if kind == "Auto":
        got = jax.jit(step)(x, cut["keys"])
        error = float(np.abs(np.asarray(got) - np.asarray(step(x, cache))).max())
    return {"axes": kind, "said": said, "serves": error < 1e-6}


# Caches whose methods are tried.
STORED = {
    "paged": {"pages": (20, 4)},
    "static": {},
    "ring": {"window": 6, "spare": 4},
    "latent": {"latent": True},
    "int8": {"store": Int8()},
    "paged float8": {"pages": (20, 4), "store": Float8()},
    "paged latent": {"pages": (20, 4), "latent": True},
}
# Mesh axes of the cache's rows and heads, and of the new tokens' rows.
PLACES = {
    "rows and heads": ("data", "model", "data"),
    "rows": ("data", None, "data"),
    "heads": (None, "model", None),
    "tokens alone": (None, None, "data"),
    "cache alone": ("data", "model", None),
}
PAGES = np.random.default_rng(3).permutation(20)  # of which the rows have the first twelve


step = partial(attend_cached, mask=CAUSAL & Window(5, 0))


def empty(rows: int, options: dict[str, Any]) -> Any:
    """A cache for twelve tokens a row, whose pages lie in no order."""
    if "pages" not in options:
        return Cache.empty(rows, 12, num_kv_heads=4, head_dim=16, **options)
    cache = PagedCache.empty(rows, 12, num_kv_heads=4, head_dim=16, **options)
    table = PAGES[: 3 * rows].reshape(rows, 3)
    return replace(cache, table=jnp.asarray(table, jnp.int32))


def worked(cache: Any, one: Any, x: Any, valid: Any, rows: Any) -> Any:
    """Every method of a cache, between a call with padding and a scan of calls of one token."""
    first, cache = step(*(y if y is None else y[:, :3] for y in x), cache, valid=valid)
    cache = cache.truncate(np.asarray([2, 9, 1, 3])).take(rows)
    if isinstance(cache, PagedCache):  # row 1 goes on from row 0, with pages of its own
        cache = cache.take(np.asarray([0, 0, 2, 3]), np.asarray([-1, PAGES[12], -1, -1]))
        cache = cache.copy_page(1, 0, PAGES[13])
        lacking = np.zeros((4, 3), bool)
        lacking[1, 1] = True
        cache = replace(cache, table=jnp.where(lacking, PAGES[14], cache.table))
    cache = cache.insert(2, one).reset(np.arange(4) == 3)

    def body(cache: Any, tokens: Any) -> Any:
        o, cache = step(*(y if y is None else y[:, None] for y in tokens), cache)
        return cache, o

    later = [y if y is None else jnp.moveaxis(y[:, 3:], 1, 0) for y in x]
    cache, last = jax.lax.scan(body, cache, later)
    return cache, (first, last)


def methods(more: bool) -> Iterator[dict[str, Any]]:
    """Whether every method gives what it gives on one device, and leaves the cache where it was."""
    valid, rows = np.arange(12).reshape(4, 3) % 5 > 0, np.asarray([2, 0, 1, 1])
    cases = [(name, place) for name in STORED for place in PLACES]
    for name, place in cases if more else [("paged", "rows and heads"), ("static", "tokens alone")]:
        cache, one = (empty(n, STORED[name]) for n in (4, 1))
        x = tokens(5, 2)
        if cache.latent:
            x[2] = None
        _, one = jax.jit(step)(*(y if y is None else y[:1] for y in x), one)
        want = jax.jit(worked)(cache, one, x, valid, rows)
        for kind in KINDS if more else KINDS[:1]:
            axes = (getattr(jax.sharding.AxisType, kind),) * 2
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axes)
            of_rows, heads, of_x = PLACES[place]

            def put(x: Any, *spec: Any, mesh: Any = mesh) -> jax.Array:
                return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

            def of(path: Any, x: Any) -> jax.Array:
                field = jax.tree_util.keystr(path[:1])
                spec = [None if "pool" in field else of_rows]  # noqa: B023
                has_heads = "keys" in field or "values" in field
                return put(x, *spec, *([heads] if has_heads else []))  # noqa: B023

            held = jax.tree.map_with_path(of, cache)
            given = (held, one, [y if y is None else put(y, of_x) for y in x], put(valid, of_x))
            for way in (jax.jit, lambda f: f) if more and kind == "Explicit" else (jax.jit,):
                got = way(worked)(*given, rows)
                pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
                yield {
                    "axes": kind,
                    "name": f"{name}, {place}{', eager' if way is not jax.jit else ''}",
                    "same": all(np.allclose(*map(np.asarray, pair), 1e-5, 1e-5) for pair in pairs),
                    "kept": kind == "Auto"
                    or jax.tree.map(jax.typeof, got[0]) == jax.tree.map(jax.typeof, held),
                }


def sentence(f: Any, *arrays: Any) -> str:
    try:
        f(*arrays)
    except ValueError as error:
        return str(error)
    return ""


def on_eight(x: list[jax.Array], cache: Cache, mask: Any) -> tuple[jax.Array, Cache, list[str]]:
    """A step whose arrays are sharded, its cache, and the collectives in its program."""
    x = [jax.device_put(y, jax.P("data", None, "model")) for y in x]
    heads = {jax.P("data", "model"): (cache.keys, cache.values)}
    rows = {jax.P("data"): (cache.positions, cache.length, cache.overflowed)}
    placed = [jax.device_put(y, spec) for spec, y in (heads | rows).items()]
    cache = type(cache)(*placed[0], *placed[1], cache.window, store=cache.store)
    step = jax.jit(lambda x, cache: attend_cached(*x, cache, mask=mask))
    text = step.lower(x, cache).compile().as_text()
    return *step(x, cache), re.findall(rf" ({COLLECTIVES})(?:-start)?\(", text)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps([sharded_lengths(kind) for kind in KINDS]))
    for each in (rows, methods):
        for row in each("--more" in sys.argv):
            print(json.dumps(row), flush=True)
