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

from typing import Any, Literal

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from ..backends.platform import mesh_of
from ..layouts import named, named_for
from ..request import Request

Where = Literal["explicit", "auto", "mixed"]


def kind_of_axes(request: Request) -> Where | None:
    """On axes of which type a request's arrays lie; None on one device, or as a shard's own part.

    "explicit" are Explicit axes, and axes named by `on`; "auto" those that XLA may cut; "mixed"
    Explicit axes beside others along which an array is cut.
    """
    if request.places is not None:
        return None
    arrays = request.q, request.k, request.v
    if named.value is not None and named_for(request.q) is not None:
        return "explicit"
    # Of a mesh of one device the Explicit axes alone: they are a part of types, which some
    # operations do not take.
    meshes = [mesh_of(x) for x in arrays]
    types = {
        kind
        for mesh in meshes
        for kind in mesh.axis_types
        if mesh.size > 1 or kind is AxisType.Explicit
    }
    if types == {AxisType.Explicit}:
        return "explicit"
    if AxisType.Explicit in types and any(_is_sharded(x) for x in arrays):
        return "mixed"
    # Without a mesh jit's `in_shardings` may say how arrays are sharded, which no type shows.
    is_hidden = isinstance(request.q, Tracer) and meshes[0].empty and jax.device_count() > 1
    return "auto" if types == {AxisType.Auto} or (not types and is_hidden) else None


def is_known(request: Request) -> bool:
    """Whether all sizes are numbers above zero; `jax.export` may leave some open."""
    arrays = request.q, request.k, request.v
    return all(isinstance(n, int) and n for x in arrays for n in x.shape)


def _is_sharded(x: Any) -> bool:
    return any(entry is not None for entry in jax.typeof(x).sharding.spec)
