"""Arrays whose types say how they are sharded: a `jax.shard_map` with just these specs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import taps
from .._internal.types import leaf_axes, wide
from ..backends.hoist import has_functions, hoist
from ..backends.local import attend_locally, weights_locally
from ..layouts import place
from ..reference import Stats
from ..request import Request, bind_rules
from ..rules import Rules, sizes_of
from . import strategies
from .sequence import Sequence
from .specs import Shards, check_spread, located, numbers_of, part_of, places_of

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

    sequence: Sequence | None = None
    name: str = "reference"

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        weights = weights_locally(q, k, rules)
        if self.sequence is None:
            return weights
        return place(weights, self.sequence.shards, self.sequence.layout, axis=-1)  # as keys come

    def specs(self, shards: Shards) -> Any:
        return shards.weights


def attend(
    request: Request, sequence: Sequence | None, name: str, attention: Any, empty: str
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and the parts of the weights `*B N T`, sharded as q is."""
    if request.rules.dropout is not None and taps.listening():
        taps.tap("keep", _dropout_keep(request, sequence))
    return _cut(Attention(name, attention, empty), sequence, request)


def _dropout_keep(request: Request, sequence: Sequence | None) -> jax.Array:
    """Which weights dropout keeps of all, in the order in which queries and keys lie."""
    rules, sizes = request.rules, request.sizes
    whole = rules if sequence is None else sequence.at_slots(rules, sizes)
    drop: Any = bind_rules(request.q, request.k, whole).dropout
    return jnp.broadcast_to(drop.grid(sizes), sizes.shape)


def weights(request: Request, sequence: Sequence | None) -> jax.Array:
    """The weights `*B N T S`, sharded as q is."""
    return _cut(Weights(sequence), sequence, request)


def _cut(task: Any, sequence: Any, request: Request) -> Any:
    q, k, v = request.q, request.k, request.v
    where = located(q, k, v)
    assert where is not None  # as who calls this has asked
    mesh, shards = where
    times = check_spread(q.shape[-2], k.shape[-2], shards.count(mesh))
    k, v = (x if times == 1 else jnp.repeat(x, times, axis=-2) for x in (k, v))
    rules = hoist(request.rules, wide(q.dtype))
    return _run_shards(task, mesh, shards, sequence, q, k, v, rules)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run_shards(task: Any, mesh: Any, shards: Shards, sequence: Any, q, k, v, rules: Rules) -> Any:
    sizes, axes = sizes_of(q, k), leaf_axes(rules)
    leaves, structure = jax.tree.flatten(rules)
    shapes = [jnp.shape(x) for x in leaves]
    inside = shards if sequence is None else sequence.inside(shards)
    specs = [_leaf_spec(x, inside.of(a, jnp.shape(x))) for a, x in zip(axes, leaves, strict=True)]
    numbers = numbers_of(sizes)
    slots = [jnp.arange(n, dtype=jnp.int32) for n in (sizes.T, sizes.S)]
    count = len(numbers)

    def local(q, k, v, *rest):
        numbers, slots, leaves = rest[:count], rest[count : count + 2], rest[count + 2 :]
        cut = slots[0] if inside.q else None, slots[1] if inside.k else None
        pairs = zip(leaves, axes, shapes, strict=True)
        leaves = [part_of(x, a, shape, numbers, cut) for x, a, shape in pairs]
        rules, places = structure.unflatten(leaves), places_of(numbers, sizes.batch)
        with taps.listen(lambda name, value: None):  # what is heard inside cannot come out
            if sequence is None:
                return task(q, k, v, bind_rules(q, k, rules, places))
            return strategies.run(sequence, task, q, k, v, rules, places)

    in_specs = (shards.queries, *(shards.keys,) * 2, *inside.numbers, *inside.slots, *specs)
    arrays = [
        _reshard(x, NamedSharding(mesh, spec))
        for x, spec in zip((q, k, v, *numbers, *slots, *leaves), in_specs, strict=True)
    ]
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=task.specs(shards),
        check_vma=not (task.name in KERNELS or has_functions(rules)),
    )(*arrays)


def _reshard(x: jax.Array, where: NamedSharding) -> jax.Array:
    """`x` where a shard_map takes it: types that say something have to say just that."""
    if AxisType.Explicit not in where.mesh.axis_types:
        return jax.lax.with_sharding_constraint(x, where)
    return jax.sharding.reshard(x, where)


def _leaf_spec(x: Any, wanted: PartitionSpec) -> PartitionSpec:
    """How an array of the rules is handed in: whole, if it comes whole and has a gradient.

    Its gradient is then one sum over the devices. Of other arrays each device takes its part.
    """
    whole = not any(jax.typeof(x).sharding.spec) and jnp.issubdtype(x.dtype, jnp.floating)
    return PartitionSpec(*(None,) * jnp.ndim(x)) if whole else wanted
