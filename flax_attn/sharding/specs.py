"""Partition specs of all arrays of an attention, from those of the queries."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .._internal.arrays import unify_varying
from .._internal.types import Sizes
from ..places import Places
from ..rules import sizes_of
from ..token_layouts import Named, named_for, names_in, partitioning
from ..where import mesh_of

Axes = Any  # a mesh axis, several of them, or None


class Shards(NamedTuple):
    """Mesh axes over which batch axes, heads, queries and keys are sharded."""

    batch: tuple[Axes, ...]
    heads: Axes
    q: Axes = None
    k: Axes = None

    @property
    def queries(self) -> PartitionSpec:
        """Spec of `*B T N H`: queries and outputs."""
        return PartitionSpec(*self.batch, self.q, self.heads, None)

    @property
    def keys(self) -> PartitionSpec:
        """Spec of `*B S K H`: keys and values."""
        return PartitionSpec(*self.batch, self.k, self.heads, None)

    @property
    def rows(self) -> PartitionSpec:
        """Spec of `*B N T`."""
        return PartitionSpec(*self.batch, self.heads, self.q)

    @property
    def weights(self) -> PartitionSpec:
        """Spec of `*B N T S`, sharded like the queries."""
        return PartitionSpec(*self.batch, self.heads, self.q, None)

    def of(self, axes: str, shape: Sequence[int]) -> PartitionSpec:
        """Spec of an array indexed by these axes of the weights, named as by `leaf_axes`.

        If queries and keys are both sharded, an array along both is sharded along the queries only.
        """
        mine = letters(axes, len(shape), len(self.batch))
        batch = iter(self.batch[len(self.batch) - mine.count("b") :])
        along = {"n": self.heads, "q": self.q, "k": self.k}
        names = [next(batch) if x == "b" else along.get(x) for x in mine]
        # An axis of length one is shared by all entries and cannot be sharded.
        entries = [entry if n > 1 else None for n, entry in zip(shape, names, strict=True)]
        if "k" in mine and "q" in mine and entries[mine.index("q")] is not None:
            entries[mine.index("k")] = None
        return PartitionSpec(*entries)

    @property
    def numbers(self) -> tuple[PartitionSpec, ...]:
        """Specs of the indices of batch entries, one array for each batch axis, and of heads."""
        return tuple(PartitionSpec(names) for names in (*self.batch, self.heads))

    @property
    def slots(self) -> tuple[PartitionSpec, ...]:
        """Specs of the indices of queries and of keys."""
        return PartitionSpec(self.q), PartitionSpec(self.k)

    def count(self, mesh: Any) -> int:
        """Number of shards of the heads."""
        return shards_in(self.heads, mesh)

    def unused(self, spec: PartitionSpec) -> tuple[str, ...]:
        """Mesh axes over which such an array is replicated, so that its gradients are summed."""
        used = {name for entry in spec for name in names_in(entry)}
        mine = [name for entry in (*self.batch, self.heads) for name in names_in(entry)]
        return tuple(name for name in mine if name not in used)


def numbers_of(sizes: Sizes) -> tuple[jax.Array, ...]:
    """Indices of batch entries along each batch axis, and of heads; sharded like q."""
    return tuple(jnp.arange(n, dtype=jnp.int32) for n in (*sizes.batch, sizes.N))


def places_of(numbers: Sequence[jax.Array], batch: Sequence[int]) -> Places:
    """Global indices of a shard with these local indices, for these batch axes."""
    *entries, heads = numbers
    whole = jnp.zeros(tuple(len(x) for x in entries), jnp.int32)
    for axis, (x, size) in enumerate(zip(entries, batch, strict=True)):
        whole = whole * size + x.reshape([-1 if i == axis else 1 for i in range(len(batch))])
    return Places(whole, heads)


def part_of(
    x: jax.Array,
    axes: str,
    shape: Sequence[int],
    numbers: Sequence[jax.Array],
    slots: Any = (None, None),
) -> jax.Array:
    """A shard's part of an array of this global shape, sliced along axes that arrived replicated.

    `slots` are the indices of the shard's queries and keys where these are sharded, else None; axes
    are as in `Shards.of`.
    """
    mine = letters(axes, x.ndim, len(numbers) - 1)
    entries = iter(numbers[len(numbers) - 1 - mine.count("b") : -1])
    along: dict[str, Any] = {"n": numbers[-1], "q": slots[0], "k": slots[1]}
    parts: list[Any] = [next(entries) if x == "b" else along.get(x) for x in mine]
    by_query = slots[0] is not None and "q" in mine and shape[mine.index("q")] > 1
    for i, part in enumerate(parts):
        if part is None or (by_query and mine[i] == "k"):
            continue
        # Still as long as the global array, so this axis was not sharded on the way in.
        if shape[i] == x.shape[i] > len(part):
            x, first = unify_varying((x, part[0]))
            x = jax.lax.dynamic_slice_in_dim(x, first, len(part), axis=i)
    return x


def letters(axes: str, rank: int, batch: int) -> list[str]:
    """For each axis of an array the axis of the weights it is indexed by; `batch` batch axes."""
    whole = [letter for axis in axes for letter in axis * (batch if axis == "b" else 1)]
    return whole[len(whole) - rank :] if axes else [""] * rank


def shards_in(entry: Axes, mesh: Any) -> int:
    """Number of shards of a dimension."""
    return math.prod(mesh.shape[name] for name in names_in(entry))


def located(q: Any, k: Any, v: Any) -> tuple[Any, Shards] | None:
    """Mesh and shardings of q, k and v, by Explicit axes or by `on`; None without either.

    Raises:
      ValueError: as `agreed` does; or for a mesh axis that is not there, or does not fit.
    """
    by_name = named_for(q)
    if by_name is not None:
        return by_name.mesh, _by_name(by_name, q, k)
    meshes = [mesh for mesh in map(mesh_of, (q, k, v)) if mesh.axis_types]
    if not meshes or {kind for mesh in meshes for kind in mesh.axis_types} != {AxisType.Explicit}:
        return None
    return meshes[0], agreed(q, k, v)


def _by_name(axes: Named, q: Any, k: Any) -> Shards:
    mesh, batch = axes.mesh, sizes_of(q, k).batch
    for what in ("batch", "heads", "length"):
        for name in names_in(getattr(axes, what)):
            if name not in mesh.shape:
                raise ValueError(
                    f"sharding.on names the mesh axis {name!r} for the {what}; the mesh has "
                    f"{', '.join(map(repr, mesh.shape)) or 'none: give it by mesh='}."
                )
    parts = shards_in(axes.batch, mesh)
    if parts > 1 and (not batch or batch[0] % parts):
        entries = batch[0] if batch else "no"
        raise ValueError(
            f"{parts} shards along {axes.batch!r} must divide the batch; got {entries} entries."
        )
    along = tuple(axes.batch if i == 0 else None for i in range(len(batch)))
    return Shards(along, axes.heads, axes.length, axes.length)


def agreed(q: Any, k: Any, v: Any) -> Shards:
    """Mesh axes of batch, heads and length, which must be the same for q, k and v.

    Raises:
      ValueError: if they do not, or if an array is sharded along its width.
    """
    specs = {name: spec_of(x) for name, x in (("q", q), ("k", k), ("v", v))}
    listed = ", ".join(f"{name} {spec}" for name, spec in specs.items())
    for name, spec in specs.items():
        if names_in(spec[-1]):
            raise ValueError(
                f"{name} is sharded along its width, over {spec[-1]!r}. Shard the heads, the axis "
                f"before it. Given: {listed}."
            )

    def one(axis: int, what: str) -> Any:
        entries = {spec[axis] for spec in specs.values() if names_in(spec[axis])}
        if len(entries) > 1:
            raise ValueError(f"q, k and v must be sharded alike along {what}; got {listed}.")
        return next(iter(entries), None)

    count, length = len(specs["q"]) - 3, one(-3, "their length")
    mesh = next((mesh for mesh in map(mesh_of, (q, k, v)) if mesh.axis_types), mesh_of(q))
    if partitioning(length, mesh) and not all(names_in(spec[-3]) for spec in specs.values()):
        raise ValueError(
            f"q, k and v must be sharded alike along their length; got {listed}. Reshard the "
            f"others over {length!r} too, by jax.sharding.reshard, or gather what is sharded."
        )
    batch = tuple(one(i, f"batch axis {i}") for i in range(count))
    return Shards(batch, one(-2, "the heads"), length, length)


def spec_of(x: Any) -> PartitionSpec:
    """PartitionSpec of an array or ShapeDtypeStruct, with one entry for each axis."""
    sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).sharding
    spec = getattr(sharding, "spec", ())
    return PartitionSpec(*spec, *(None,) * (len(x.shape) - len(spec)))


def check_spread(heads: int, key_heads: int, shards: int, who: str = "") -> int:
    """How often key heads are repeated to divide among the shards; ValueError if impossible.

    Each copy keeps its own query heads.
    """
    times = math.lcm(key_heads, shards) // key_heads
    if heads % (key_heads * times):
        instead = ' Take strategy="ring" or "all_gather", which leave heads alone.' if who else ""
        raise ValueError(
            f"{who}{heads} query heads on {key_heads} key heads cannot be spread over {shards} "
            f"shards; {key_heads * times} must divide the query heads.{instead}"
        )
    return times
