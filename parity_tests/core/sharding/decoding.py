"""Decoding on eight devices, rows over two and heads over four: one line of JSON for each case.

Each cache is tried on axes of one kind, or with `--more` on axes of both.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import CAUSAL, Cache, Int8, PagedCache, Window, attend_cached

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

    def put(x: jax.Array) -> jax.Array:
        spec = (None, None, "seq") if x.ndim == 4 else ()
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))

    cut = {name: jax.tree.map(put, cache) for name, cache in caches.items()}
    said = {name: [sentence(f, x, cut[name]) for f in (step, jax.jit(step))] for name in cut}
    error = 0.0
    if kind == "Auto":
        got = jax.jit(step)(x, cut["keys"])
        error = float(np.abs(np.asarray(got) - np.asarray(step(x, cache))).max())
    return {"axes": kind, "said": said, "serves": error < 1e-6}


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
    for row in rows("--more" in sys.argv):
        print(json.dumps(row))
