"""Caches over Explicit mesh axes, where the type of an array says how it is sharded.

An array of a cache stays sharded as it is, so that `jax.lax.scan` can carry the cache: new tokens
are brought to where its rows and heads lie. Over axes of type Auto, XLA does as much.
"""

from typing import Any, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..sharding.specs import shards_in, spec_of
from ..token_layouts import names_in
from ..where import mesh_of

Tree = TypeVar("Tree")


def explicit_mesh(tree: Any) -> Any:
    """The mesh of the first array on one with Explicit axes; None if none is.

    With its devices, if it is known: outside jit an array that lies elsewhere is moved to them.
    """
    on_mesh = (x for x in jax.tree.leaves(tree) if AxisType.Explicit in mesh_of(x).axis_types)
    x = next(on_mesh, None)
    if x is None:
        return None
    return mesh_of(x) if isinstance(x, Tracer) else x.sharding.mesh


def mesh_of_sharded(tree: Any) -> Any:
    """The mesh of the arrays if any is sharded over Explicit axes, else None."""
    sharded = [x for x in jax.tree.leaves(tree) if any(map(names_in, spec_of(x)))]
    return explicit_mesh(sharded)


def resharded(tree: Tree, mesh: Any, *entries: Any) -> Tree:
    """Arrays whose first axes are sharded as `entries` say, and the others whole.

    An array with fewer axes takes the first entries, and one that is on no mesh is moved to this
    one. Nothing is moved if `mesh` is None.
    """

    def move(x: jax.Array) -> jax.Array:
        spec = PartitionSpec(*(*entries, *[None] * x.ndim)[: x.ndim])
        if mesh is None or (spec == spec_of(x) and not mesh_of(x).empty):
            return x
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    return jax.tree.map(move, tree)


def gathered(tree: Tree) -> Tree:
    """Arrays that are whole on every device."""
    return resharded(tree, mesh_of_sharded(tree))


def sharded_like(tree: Tree, like: Any) -> Tree:
    """Arrays sharded as those of `like`, where the shards divide them."""
    mesh = mesh_of_sharded((tree, like))
    if mesh is None:
        return tree

    def move(x: jax.Array, y: jax.Array) -> jax.Array:
        return resharded(x, mesh, *fitting(spec_of(y), x.shape, mesh))

    return jax.tree.map(move, tree, like)


def fitting(spec: PartitionSpec, shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """`spec`, with None where the shards do not divide the axis."""
    parts = (
        entry if size % shards_in(entry, mesh) == 0 else None
        for entry, size in zip(spec, shape, strict=True)
    )
    return PartitionSpec(*parts)
