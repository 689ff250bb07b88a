"""Arrays whose types say how they are sharded: a `jax.shard_map` with just these specs."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import taps
from .._types import leaf_axes, wide
from ..backends.hoist import has_functions, hoist
from ..backends.local import attend_locally, bound, weights_locally
from ..reference import Stats
from ..rules import Rules, sizes_of
from .specs import Shards, names_in, numbers_of, part_of, places_of

KERNELS = (
    "cudnn",
    "splash",
    "tokamax",
)  # do not say over which axes they vary, as traced functions


class Attention(NamedTuple):
    """What a device computes for `attend`: the output and the parts of the weights."""

    name: str
    attention: Any
    empty: str

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        return attend_locally(self.attention, q, k, v, rules, self.empty)

    def specs(self, shards: Shards) -> Any:
        return shards.queries, shards.rows  # of both m and l


class Weights(NamedTuple):
    """What a device computes for `attention_weights`, by the plain formula."""

    name: str = "reference"

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        return weights_locally(q, k, rules)

    def specs(self, shards: Shards) -> Any:
        return shards.weights


def attend(
    name: str,
    attention: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rules: Rules,
    empty: str,
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and the parts of the weights `*B N T`, sharded as q is."""
    return _cut(Attention(name, attention, empty), q, k, v, rules)


def weights(q: jax.Array, k: jax.Array, rules: Rules) -> jax.Array:
    """The weights `*B N T S`, sharded as q is."""
    return _cut(Weights(), q, k, k, rules)


def _cut(task: Any, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
    types = [jax.typeof(x).sharding for x in (q, k, v)]
    mesh = next(kind.mesh for kind in types if kind.mesh.axis_types)
    shards = _agreed({n: kind.spec for n, kind in zip("qkv", types, strict=True)})
    k, v = (_repeated(x, shards.count(mesh), q.shape[-2]) for x in (k, v))
    rules = hoist(rules, wide(q.dtype))
    return _run(task, mesh, shards, q, k, v, rules)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _run(task: Any, mesh: Any, shards: Shards, q, k, v, rules: Rules) -> Any:
    sizes, axes = sizes_of(q, k), leaf_axes(rules)
    leaves, structure = jax.tree.flatten(rules)
    specs = [_as_it_comes(x, shards.of(a, jnp.shape(x))) for a, x in zip(axes, leaves, strict=True)]
    count = len(sizes.batch) + 1

    def local(q, k, v, *rest):
        numbers, leaves = rest[:count], rest[count:]
        leaves = [part_of(x, a, numbers) for x, a in zip(leaves, axes, strict=True)]
        rules = bound(q, k, structure.unflatten(leaves), places_of(numbers, sizes.batch))
        with taps.listen(lambda name, value: None):  # what is heard inside cannot come out
            return task(q, k, v, rules)

    given = (*(shards.queries,) * 3, *shards.numbers, *specs)
    arrays = [
        jax.sharding.reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip((q, k, v, *numbers_of(sizes), *leaves), given, strict=True)
    ]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=given,
        out_specs=task.specs(shards),
        check_vma=not (task.name in KERNELS or has_functions(rules)),
    )(*arrays)


def _as_it_comes(x: Any, wanted: PartitionSpec) -> PartitionSpec:
    """How an array of the rules is handed in: whole, if it comes whole and has a gradient.

    Its gradient is then one sum over the devices. Of other arrays each device takes its part.
    """
    whole = not any(jax.typeof(x).sharding.spec) and jnp.issubdtype(x.dtype, jnp.floating)
    return PartitionSpec(*(None,) * jnp.ndim(x)) if whole else wanted


def _agreed(specs: dict[str, PartitionSpec]) -> Shards:
    """The axes of batch entries and heads, on which q, k and v must agree."""
    given = ", ".join(f"{name} {spec}" for name, spec in specs.items())
    for name, spec in specs.items():
        if names_in(spec[-3]):
            raise NotImplementedError(
                f"{name} is sharded along its length, over {spec[-3]!r}. attend shards batch and "
                f"heads; gather the length first, by jax.sharding.reshard. Given: {given}."
            )
        if names_in(spec[-1]):
            raise ValueError(
                f"{name} is sharded along its width, over {spec[-1]!r}. Shard the heads, the axis "
                f"before it. Given: {given}."
            )

    def one(axis: int, what: str) -> Any:
        found = {spec[axis] for spec in specs.values() if names_in(spec[axis])}
        if len(found) > 1:
            raise ValueError(f"q, k and v must be sharded alike along {what}; got {given}.")
        return next(iter(found), None)

    count = len(specs["q"]) - 3
    return Shards(tuple(one(i, f"batch axis {i}") for i in range(count)), one(-2, "the heads"))


def _repeated(x: jax.Array, shards: int, heads: int) -> jax.Array:
    """Keys or values with as many heads as the shards need, each for the same queries as before."""
    K = x.shape[-2]
    times = math.lcm(K, shards) // K
    if times == 1:
        return x
    if heads % (K * times):
        raise ValueError(
            f"{heads} query heads on {K} key heads cannot be spread over {shards} shards; "
            f"{K * times} must divide the query heads."
        )
    return jnp.repeat(x, times, axis=-2)
