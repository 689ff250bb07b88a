"""Attention whose batch entries and heads lie on several devices: each computes its own.

No device needs another's entries or heads, so nothing is gathered: forward there is no collective,
backward only the sum of the gradients of arrays that all share (sinks, scores, scale). Where the
length lies on several devices too, `context_parallel` says how attention goes over it.

Axes of type Explicit, `jax.make_mesh`'s default, say in every array's type how it is sharded:
`explicit` puts a `jax.shard_map` around the backend. Axes of type Auto say nothing until XLA
compiles: `auto` leaves the plain formula to XLA, and hands attention in blocks over by
`custom_partitioning`. Where the caller's own `jax.shard_map` has made the axes Manual, arrays are
local already.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from ..backends.local import mean_where_empty
from ..backends.platform import mesh_of
from ..layouts import named_for
from ..reference import Stats
from . import auto, explicit
from .sequence import Sequence, prepared


def attend_sharded(
    name: str,
    attention: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rules: Any,
    empty: str,
    sequence: Sequence | None,
) -> tuple[jax.Array, Stats] | None:
    """Output and parts of the weights of arrays on several devices; None if they lie on one.

    Raises:
      ValueError: if q, k and v are sharded differently, or along their width.
      NotImplementedError: if they are sharded over axes of several types.
    """
    types = mesh_types(q, k, v)
    if types == {AxisType.Explicit} or named_for(q) is not None:
        return explicit.attend(name, attention, q, k, v, rules, empty, sequence)
    cut = AxisType.Explicit in types and any(_is_cut(x) for x in (q, k, v))
    if cut and name != "reference":
        raise NotImplementedError(
            "attention over a mesh of Explicit axes beside others cannot be cut; make all its axes "
            "Explicit or all Auto, call attend inside a jax.shard_map over all of them, or ask for "
            'backend="reference".'
        )
    known = all(isinstance(n, int) and n for x in (q, k, v) for n in x.shape)
    if name == "blockwise" and known and _may_be_auto(types, q):
        o, stats = auto.attend(q, k, v, rules)
        if empty == "mean":
            o = mean_where_empty(auto.attend, q, k, v, rules, o, stats)
        return o, stats
    return None


def weights_sharded(q: jax.Array, k: jax.Array, rules: Any) -> jax.Array | None:
    """The weights `*B N T S` of arrays over Explicit axes; None elsewhere, where XLA shards them.

    Raises:
      ValueError, NotImplementedError: as `attend_sharded` does.
    """
    if mesh_types(q, k) != {AxisType.Explicit} and named_for(q) is None:
        return None
    sequence, rules = prepared(q, k, k, rules, "all_gather")
    return explicit.weights(q, k, rules, sequence)


def _is_cut(x: Any) -> bool:
    return any(entry is not None for entry in jax.typeof(x).sharding.spec)


def mesh_types(*arrays: jax.Array) -> set[AxisType]:
    """The types of the axes on which arrays lie; of a mesh of one device the Explicit ones alone.

    An Explicit axis of one device is a part of types, which some operations do not take.
    """
    kinds = [(mesh, kind) for mesh in map(mesh_of, arrays) for kind in mesh.axis_types]
    return {kind for mesh, kind in kinds if mesh.size > 1 or kind is AxisType.Explicit}


def _may_be_auto(types: set[AxisType], q: Any) -> bool:
    """Whether XLA may shard these arrays: by their types, or as jit's `in_shardings` may say."""
    if types or not isinstance(q, Tracer):
        return types == {AxisType.Auto}
    return jax.typeof(q).sharding.mesh.empty and jax.device_count() > 1
