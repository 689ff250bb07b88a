"""The machine that a request is for: the one at hand, unless another is assumed."""

import os
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.core import Tracer


class Assumed(NamedTuple):
    """A machine to compile for: "cpu", "gpu" or "tpu", and of a GPU its compute capability."""

    platform: str
    capability: tuple[int, int] | None = None


_assumed = jax.make_user_context(None)


def assume_platform(
    platform: str, capability: tuple[int, int] | None = None
) -> AbstractContextManager[None]:
    """A context in which `attend` chooses and refuses as on another machine.

    The choice of a backend is made while a function is traced, for the machine at hand. What is
    traced inside, by `jax.jit(f).lower(...)`, by `jax.export` or ahead of time for a topology, is
    traced for `platform` instead; `jax.jit` traces anew for every assumed platform.

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
    """The mesh on which `x` lies, or of size 1; of an array, traced or not, or its shape alone."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return getattr(x.sharding, "mesh", None) or jax.sharding.AbstractMesh((), ())
    return jax.typeof(x).sharding.mesh


def platform_of(x: jax.Array) -> str:
    """Where `x` lies; of a traced array, the assumed platform, or what is compiled for."""
    if _assumed.value is not None:
        return _assumed.value.platform
    if not isinstance(x, Tracer | jax.ShapeDtypeStruct):
        return next(iter(x.devices())).platform
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, jax.Device):
        return device.platform
    return jax.default_backend() if device is None else jax.devices(device)[0].platform


def capability_of(x: jax.Array) -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU that `x` is for; None if it is for none."""
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
    """The processor's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
