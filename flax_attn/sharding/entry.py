"""Attention with batch and heads sharded over devices: each device computes its own part.

No device needs another's batch entries or heads, so the forward pass has no collectives and the
backward pass only sums the gradients of replicated arrays (sinks, scores, scale). If the length is
sharded too, `context_parallel` chooses the strategy.

With axes of type Explicit, `jax.make_mesh`'s default, every array's type shows its sharding, and
`explicit` wraps the backend in a `jax.shard_map`. With axes of type Auto, shardings are known only
when XLA compiles: `auto` leaves the plain formula to XLA and passes blockwise attention to
`custom_partitioning`. Inside the caller's `jax.shard_map` axes are Manual and arrays already local.
"""

from typing import Any, Literal

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from ..backends.platform import mesh_of
from ..request import Request
from ..token_layouts import named, named_for

Where = Literal["explicit", "auto", "mixed"]


def kind_of_axes(request: Request) -> Where | None:
    """Type of the mesh axes of a request's arrays; None on one device or inside a shard.

    "explicit": Explicit axes, or axes named by `on`; "auto": axes that XLA may partition; "mixed":
    Explicit axes together with others, and an array sharded along one of them.
    """
    if request.places is not None:
        return None
    arrays = request.q, request.k, request.v
    if named.value is not None and named_for(request.q) is not None:
        return "explicit"
    # Explicit axes count even on a mesh of one device: they are part of the array's type, which
    # some operations reject.
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
    # Without a mesh, jit's `in_shardings` may still shard the arrays; no type shows it.
    is_hidden = isinstance(request.q, Tracer) and meshes[0].empty and jax.device_count() > 1
    return "auto" if types == {AxisType.Auto} or (not types and is_hidden) else None


def is_known(request: Request) -> bool:
    """Whether all sizes are positive integers; `jax.export` may leave some symbolic."""
    arrays = request.q, request.k, request.v
    return all(isinstance(n, int) and n for x in arrays for n in x.shape)


def _is_sharded(x: Any) -> bool:
    return any(entry is not None for entry in jax.typeof(x).sharding.spec)
