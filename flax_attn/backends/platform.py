"""The target platform of a request: the current machine, unless another is assumed."""

import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.core import Tracer


class Assumed(NamedTuple):
    """A compilation target: "cpu", "gpu" or "tpu", and a GPU's compute capability."""

    platform: str
    capability: tuple[int, int] | None = None


_assumed = jax.make_user_context(None)


def assume_platform(
    platform: str, capability: tuple[int, int] | None = None
) -> AbstractContextManager[None]:
    """A context in which `attend` chooses a backend as on another platform.

    Backends are chosen at trace time, for the current machine. Functions traced in this context, by
    `jax.jit(f).lower(...)`, `jax.export` or ahead-of-time compilation for a topology, are traced
    for `platform` instead; `jax.jit` retraces for every assumed platform.

    Args:
      platform: "cpu", "gpu" or "tpu".
      capability: a GPU's compute capability, (9, 0) for an H100 or H200; None means (8, 0).

    Raises:
      ValueError: for another platform.

    >>> import jax.numpy as jnp
    >>> with assume_platform("tpu"):
    ...     platform_of(jnp.ones(3))
    'tpu'
    """
    if platform not in ("cpu", "gpu", "tpu"):
        raise ValueError(f"platform must be 'cpu', 'gpu' or 'tpu'; got {platform!r}.")
    return _assumed(Assumed(platform, capability))


def mesh_of(x: Any) -> Any:
    """The mesh of an array, traced array or ShapeDtypeStruct; an empty mesh if it has none."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "mesh", None) or jax.sharding.AbstractMesh((), ())
    return jax.typeof(x).sharding.mesh


def platform_of(x: jax.Array) -> str:
    """Platform of `x`; for a traced array the assumed platform or the default device's."""
    if _assumed.value is not None:
        return _assumed.value.platform
    if not isinstance(x, Tracer | jax.ShapeDtypeStruct):
        return next(iter(x.devices())).platform
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, jax.Device):
        return device.platform
    return jax.default_backend() if device is None else jax.devices(device)[0].platform


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
