"""Where the arrays of an attention lie: platform, mesh, and the kind of its axes.

No device needs another's batch entries or heads, so an attention sharded along them has no
collectives in the forward pass, and the backward pass only sums the gradients of replicated arrays
(sinks, scores, scale). If the length is sharded too, `context_parallel` chooses the strategy.

With axes of type Explicit, `jax.make_mesh`'s default, every array's type shows its sharding, and
`sharding.explicit` wraps the backend in a `jax.shard_map`. With axes of type Auto, shardings are
known only when XLA compiles: `sharding.auto` leaves the plain formula to XLA and passes blockwise
attention to `custom_partitioning`. Inside the caller's `jax.shard_map` axes are Manual and arrays
already local.
"""

import os
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType

from .token_layouts import named, named_for


class Assumed(NamedTuple):
    """A compilation target: "cpu", "gpu" or "tpu", a GPU's compute capability, and its kind."""

    platform: str
    capability: tuple[int, int] | None = None
    device_kind: str | None = None


_assumed = jax.make_user_context(None)


def assume_platform(
    platform: str, capability: tuple[int, int] | None = None, *, device_kind: str | None = None
) -> AbstractContextManager[None]:
    """A context in which `attend` chooses a backend as on another platform.

    Backends are chosen at trace time, for the current machine. Functions traced in this context, by
    `jax.jit(f).lower(...)`, `jax.export` or ahead-of-time compilation for a topology, are traced
    for `platform` instead; `jax.jit` retraces for every assumed platform.

    Args:
      platform: "cpu", "gpu" or "tpu".
      capability: a GPU's compute capability, (9, 0) for an H100 or H200; None means (8, 0).
      device_kind: for tests: the device kind whose file by `use_device_file` counts here; None
        means that no file does.

    Raises:
      ValueError: for another platform.

    >>> import jax.numpy as jnp
    >>> with assume_platform("tpu"):
    ...     platform_of(jnp.ones(3))
    'tpu'
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform must be 'cpu', 'gpu' or 'tpu'; got {platform!r}.")
    return _assumed(Assumed(platform, capability, device_kind))


def is_assumed() -> bool:
    """Whether the platform is an assumed one."""
    return _assumed.value is not None


class Where(NamedTuple):
    """Where the arrays of a request lie, or will when a traced program runs.

    Attributes:
      axes: "explicit" for Explicit mesh axes, or axes named by `on`; "auto" for axes that XLA may
        partition; "mixed" for Explicit axes together with others, and an array sharded along one
        of them; None on one device or inside a shard.
      mesh: that of the queries; empty if they have none.
      platform: "cpu", "gpu" or "tpu".
      capability: compute capability of an NVIDIA GPU; None for other platforms.
    """

    axes: Literal["explicit", "auto", "mixed"] | None
    mesh: Any
    platform: str
    capability: tuple[int, int] | None


def where_of(request: Any) -> Where:
    """Where q, k and v of a request lie; its `places` say that they are shards."""
    arrays = request.q, request.k, request.v
    meshes, platform = [mesh_of(x) for x in arrays], platform_of(request.q)
    capability = capability_of(request.q) if platform == "gpu" else None
    # Explicit axes count even on a mesh of one device: they are part of the array's type, which
    # some operations reject.
    types = {
        kind
        for mesh in meshes
        for kind in mesh.axis_types
        if mesh.size > 1 or kind is AxisType.Explicit
    }
    axes = None
    if request.places is None:
        # Without a mesh, jit's `in_shardings` may still shard the arrays; no type shows it.
        is_hidden = not types and isinstance(request.q, Tracer) and meshes[0].empty
        if named.value is not None and named_for(request.q) is not None:
            axes = "explicit"
        elif types == {AxisType.Explicit}:
            axes = "explicit"
        elif AxisType.Explicit in types and any(any(jax.typeof(x).sharding.spec) for x in arrays):
            axes = "mixed"
        elif types == {AxisType.Auto} or (is_hidden and jax.device_count() > 1):
            axes = "auto"
    return Where(axes, meshes[0], platform, capability)


def mesh_of(x: Any) -> Any:
    """The mesh of an array, traced array or ShapeDtypeStruct; an empty mesh if it has none."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "mesh", None) or jax.sharding.AbstractMesh((), ())
    return jax.typeof(x).sharding.mesh


def platform_of(x: jax.Array) -> str:
    """Platform of `x`; for a traced array the assumed platform or the default device's."""
    if _assumed.value is not None:
        return _assumed.value.platform
    return _device_of(x).platform


def device_kind_of(x: jax.Array) -> str | None:
    """Kind of the device that `x` is for, as "NVIDIA H200"; for an assumed one None if unknown."""
    return _device_of(x).device_kind if _assumed.value is None else _assumed.value.device_kind


def _device_of(x: jax.Array) -> Any:
    """A device of `x`; for a traced array the default device."""
    if not isinstance(x, Tracer | jax.ShapeDtypeStruct):
        return next(iter(x.devices()))
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return device if isinstance(device, jax.Device) else jax.devices(device)[0]


def capability_of(x: jax.Array) -> tuple[int, int] | None:
    """Compute capability of the NVIDIA GPU that `x` is for; None for other platforms."""
    if platform_of(x) != "gpu":
        return None
    if _assumed.value is not None:
        return _assumed.value.capability or (8, 0)
    device = jax.devices("gpu")[0]
    if "cuda" not in device.client.platform_version:
        return None
    major, _, minor = device.compute_capability.partition(".")
    return int(major), int(minor or 0)


def cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
