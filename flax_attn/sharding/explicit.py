"""Attention on Explicit mesh axes: a `jax.shard_map` with the specs of the arrays' types."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .. import taps
from .._internal.types import leaf_axes, wide
from ..backends.hoist import has_functions, hoist
from ..backends.local import attend_locally, weights_locally
from ..reference import Stats
from ..rules import Request, Rules, bind_rules, sizes_of
from ..token_layouts import place
from . import strategies
from .sequence import Sequence
from .specs import Shards, check_spread, located, numbers_of, part_of, places_of

# Like traced functions, these declare no varying axes, so shard_map must not check for them.
KERNELS = ("cudnn", "splash", "tokamax")


class Attention(NamedTuple):
    """One device's part of `attend`: output and softmax statistics."""

    name: str
    attention: Any
    empty: str

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        return attend_locally(self.attention, q, k, v, rules, self.empty)

    def specs(self, shards: Shards) -> Any:
        return shards.queries, shards.rows  # of both m and l


class Weights(NamedTuple):
    """One device's part of `attention_weights`, by the plain formula."""

    sequence: Sequence | None = None
    name: str = "reference"

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Any:
        weights = weights_locally(q, k, rules)
        if self.sequence is None:
            return weights
        return place(
            weights, self.sequence.shards, self.sequence.layout, axis=-1
        )  # in the order of the keys

    def specs(self, shards: Shards) -> Any:
        return shards.weights


def attend(
    request: Request, sequence: Sequence | None, name: str, attention: Any, empty: str
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and softmax statistics `*B N T`, sharded like q."""
    # The mask is recorded as one array here: taps inside the shard_map cannot leave it.
    if request.rules.dropout is not None and taps.listening():
        taps.tap("keep", _dropout_keep(request, sequence))
    return _cut(Attention(name, attention, empty), sequence, request)


def _dropout_keep(request: Request, sequence: Sequence | None) -> jax.Array:
    """Dropout mask of all weights, in the order of the slots."""
    rules, sizes = request.rules, request.sizes
    whole = rules if sequence is None else sequence.at_slots(rules, sizes)
    drop: Any = bind_rules(request.q, request.k, whole).dropout
    return jnp.broadcast_to(drop.grid(sizes), sizes.shape)


def weights(request: Request, sequence: Sequence | None) -> jax.Array:
    """Attention weights `*B N T S`, sharded like q."""
    return _cut(Weights(sequence), sequence, request)


def _cut(task: Any, sequence: Any, request: Request) -> Any:
    q, k, v = request.q, request.k, request.v
    where = located(q, k, v)
    assert where is not None  # the caller has checked it
    mesh, shards = where
    # Key heads are repeated if there are fewer of them than shards.
    times = check_spread(q.shape[-2], k.shape[-2], shards.count(mesh))
    k, v = (x if times == 1 else jnp.repeat(x, times, axis=-2) for x in (k, v))
    # A shard_map cannot close over arrays of the surrounding trace; hoisting makes them operands.
    rules = hoist(request.rules, wide(q.dtype))
    return _run_shards(task, mesh, shards, sequence, q, k, v, rules)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run_shards(task: Any, mesh: Any, shards: Shards, sequence: Any, q, k, v, rules: Rules) -> Any:
    sizes, axes = sizes_of(q, k), leaf_axes(rules)
    leaves, structure = jax.tree.flatten(rules)
    shapes = [jnp.shape(x) for x in leaves]
    inside = shards if sequence is None else sequence.inside(shards)
    specs = [_leaf_spec(x, inside.of(a, jnp.shape(x))) for a, x in zip(axes, leaves, strict=True)]
    # Each device gets its part of these indices, and so knows its global place.
    numbers = numbers_of(sizes)
    slots = [jnp.arange(n, dtype=jnp.int32) for n in (sizes.T, sizes.S)]
    count = len(numbers)

    def local(q, k, v, *rest):
        numbers, slots, leaves = rest[:count], rest[count : count + 2], rest[count + 2 :]
        cut = slots[0] if inside.q else None, slots[1] if inside.k else None
        pairs = zip(leaves, axes, shapes, strict=True)
        leaves = [part_of(x, a, shape, numbers, cut) for x, a, shape in pairs]
        rules, places = structure.unflatten(leaves), places_of(numbers, sizes.batch)
        with taps.listen(lambda name, value: None):  # taps inside cannot leave the shard_map
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
    """`x` with the sharding that the shard_map expects; Explicit types must match it exactly."""
    if AxisType.Explicit not in where.mesh.axis_types:
        return jax.lax.with_sharding_constraint(x, where)
    return jax.sharding.reshard(x, where)


def _leaf_spec(x: Any, wanted: PartitionSpec) -> PartitionSpec:
    """Spec of a leaf of the rules: replicated if it arrives replicated and has a gradient.

    Its gradient is then a single sum over the devices. Other leaves are sharded as wanted.
    """
    whole = not any(jax.typeof(x).sharding.spec) and jnp.issubdtype(x.dtype, jnp.floating)
    return PartitionSpec(*(None,) * jnp.ndim(x)) if whole else wanted
