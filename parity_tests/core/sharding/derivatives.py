"""Derivatives on four devices beside one: run as a program of its own, it prints what it found.

`python -m parity_tests.core.sharding.derivatives` makes four devices of one CPU, which must be said
before jax starts. Batch and heads are cut inside the caller's `jax.shard_map`, and on Explicit
axes; with `--more` by other rules and on Auto axes too. The gradient of a jvp must be that of one
device.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"
)

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import CAUSAL, Dropout, Lengths, Places, Softcap, attend
from flax_attn.backends.blockwise import autodiff
from flax_attn.parity import judge

B, T, N, K, H = 4, 9, 8, 4, 3
SPEC = P("data", None, "model", None)
LENGTHS = np.asarray([9, 0, 4, 7])
RULES = {
    "dropout and lengths": {
        "mask": Lengths(LENGTHS),
        "dropout": Dropout(0.3, jax.random.key(0)),
    },
    "causal": {"mask": CAUSAL, "score": Softcap(2.0)},
}


def step(attention, cotangent, at, along):
    """Gradients of a loss that has a jvp in it."""

    def loss(at):
        o, do = jax.jvp(attention, at, along)
        return (cotangent * (jnp.sin(o) + jnp.cos(do) * do)).sum()

    return jax.grad(loss)(at)


def by_shards(mesh, mask, **rules):
    """`attend` inside the caller's shard_map, with its part of places and lengths."""

    def local(q, k, v, b, n, lengths):
        shown = Lengths(lengths) if isinstance(mask, Lengths) else mask
        return attend(q, k, v, mask=shown, places=Places(b, n), backend="autodiff", **rules)

    entry, head = P("data"), P("model")
    specs = (SPEC, SPEC, SPEC, entry, head, entry)
    whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=SPEC)
    return lambda *qkv: whole(*qkv, jnp.arange(B), jnp.arange(N), LENGTHS)


def arrays():
    normal = np.random.RandomState(0).standard_normal
    shapes = [(B, T, n, H) for n in (N, K, K)]
    return [tuple(normal(x) for x in shapes) for _ in range(2)], normal((B, T, N, H))


def placed(tree, mesh):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, SPEC)), tree)


def main():
    jax.config.update("jax_enable_x64", True)
    autodiff.CPU_PAIRS = 8, 4  # several blocks of these few tokens
    (at, along), cotangent = arrays()
    more = "--more" in sys.argv
    for name, rules in RULES.items() if more else [*RULES.items()][:1]:
        one = partial(attend, backend="autodiff", **rules)
        want = jax.jit(partial(step, one))(cotangent, at, along)
        for kind in (AxisType.Explicit, AxisType.Auto):
            mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
            ways = {"attend": one} if more or kind is AxisType.Explicit else {}
            if kind is AxisType.Auto:
                ways["shard_map"] = by_shards(mesh, **rules)
            for way, attention in ways.items():
                got = jax.jit(partial(step, attention))(*placed((cotangent, at, along), mesh))
                pairs = zip(got, want, strict=True)
                ok = [judge.same_function(np.asarray(a), np.asarray(b)).ok for a, b in pairs]
                print(json.dumps([name, kind.name, way, all(ok)]))


if __name__ == "__main__":
    main()
