"""The machine: device names, library versions and measured matmul throughput."""

import os
import platform as host
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..where import cores
from .task import platform

# Dense bfloat16 FLOP/s and memory bytes/s by part of the name, as NVIDIA publishes for SXM cards.
KNOWN = {
    "H100": {"flops": 989e12, "bytes": 3.35e12},
    "H200": {"flops": 989e12, "bytes": 4.8e12},
}
SHOWN = ("flax-attn", "jax", "jaxlib", "flax", "equinox", "torch", "tokamax", "numpy")
TIMES = 10


def machine(dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Returns device, processor, versions, and the measured matmul peak in each dtype."""
    device = jax.devices()[0]
    facts: dict[str, Any] = {
        "began": datetime.now(UTC).isoformat(" ", "minutes")[:16],
        "platform": device.platform,
        "device": device.device_kind,
        "processor": processor(),
        "cores": cores(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": host.python_version(),
        "versions": {name: v for name in SHOWN if (v := _version(name))},
        "peak_flops": {dtype: peak(dtype) for dtype in dtypes},
        "compilation_cache": bool(
            jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
        ),
    }
    limits = next((v for name, v in KNOWN.items() if name in device.device_kind.upper()), None)
    return {**facts, "limits": limits} if limits else facts


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return lines[0] if lines else host.machine()
    except OSError:
        return host.processor() or host.machine()


def peak(dtype: str) -> float:
    """FLOP/s of one large matrix product, the better of jax's and torch's."""
    size = 8192 if platform() != "cpu" else 2048 if dtype == "float32" else 1024
    # Random, since a GPU multiplies constant matrices faster.
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(jnp.matmul)
    seconds = [_least(lambda: product(x, x).block_until_ready())]
    if platform() == "cpu" and find_spec("torch") is not None:
        torch = import_module("torch")
        ones = torch.ones((size, size), dtype=getattr(torch, dtype))
        seconds.append(_least(lambda: torch.matmul(ones, ones)))
    return 2 * size**3 / min(seconds)


def _least(call: Callable[[], object]) -> float:
    """The least seconds of some calls, after one that is not timed."""
    call()
    seconds = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def available_memory() -> float:
    """Bytes that a competitor may use: most of the free memory, of the accelerator if present."""
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return 0.9 * (stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 0.8 * 1024 * float(lines["MemAvailable"].split()[0])
    except (OSError, KeyError):  # not Linux: unknown
        return np.inf
