"""Memory of a sharded length on virtual devices: a program, which prints temporaries in bytes.

For each strategy those of a device for a causal attention with gradients, at T tokens on n devices,
at 2 T on n, and at 2 T on 2 n. Nothing is run.
"""

import json
import os

os.environ["XLA_FLAGS"] = (  # the last of a flag counts, that of whoever imports this one
    f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}"
)

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import CAUSAL, attend
from flax_attn.sharding import context_parallel

T, DEVICES = 8192, 4
STRATEGIES = ("ring", "ulysses", "all_gather")


def temporary(strategy: str, length: int, devices: int) -> int:
    mesh = jax.make_mesh((devices,), ("seq",), devices=jax.devices()[:devices])
    cut = NamedSharding(mesh, P("seq"))
    x = jax.ShapeDtypeStruct((length, 8, 32), jnp.float32, sharding=cut)

    def both_ways(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda *x: attend(*x, mask=CAUSAL, backend="blockwise"), *arrays)
        return back(jnp.sin(out))

    with context_parallel(strategy):
        stats = jax.jit(both_ways).lower(x, x, x).compile().memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes


if __name__ == "__main__":
    for strategy in STRATEGIES:
        sizes = ((T, DEVICES), (2 * T, DEVICES), (2 * T, 2 * DEVICES))
        print(json.dumps([strategy, *(temporary(strategy, *size) for size in sizes)]))
