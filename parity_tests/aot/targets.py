"""Machines that are not here: their compilers run on any Linux machine, and make their code.

libtpu compiles for every TPU, XLA's CUDA plugin for a GPU of which it is told; both come with the
extra `aot` and need neither the machine nor the network, nor NVIDIA's own packages.
"""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.topologies import get_topology_desc

from flax_attn.where import assume_platform

TPUS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}  # as libtpu spells them
GPUS = ("h200",)
NAMES = (*TPUS, *GPUS)
# The datasheet of a GH100 with 132 multiprocessors and 141 GB, in the words of XLA's
# GpuTargetConfigProto; as in XLA's own list of targets.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
# Without a GPU nothing can be tuned, and for a few tiny products the tile that XLA then gives its
# Triton kernels fits none ("Couldn't find output tile sizes"): products go to cuBLAS.
OPTIONS = {"gpu": {"xla_gpu_enable_triton_gemm": False}, "tpu": None}
ALONE = {  # no questions to a cloud's metadata server, no lock, no log files
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
WITHOUT_NVIDIA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}  # cuBLAS and cuDNN are not here
PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def missing(name: str) -> str | None:
    """Why there is no compiler for a target, or None."""
    if name in TPUS:
        package, found = "libtpu", find_spec("libtpu") is not None
    else:
        package, found = "jax-cuda13-plugin", bool(_plugins())
    how = 'pip install "flax-attn[aot]"'
    return None if found else f"nothing compiles for {name}: {package} is not installed ({how})."


def device(name: str) -> jax.Device:
    """The first device of a target, for shardings; it compiles and holds no arrays."""
    return devices(name)[0]


@cache
def devices(name: str, gpus: int = 1) -> list[jax.Device]:
    """All of a slice of TPUs, or so many GPUs of one host; they compile and hold no arrays."""
    if name in TPUS:
        with _environment(ALONE):
            return get_topology_desc(TPUS[name], "tpu").devices
    kwargs = {"topology": f"1x1x{gpus}", "target_config": H200}
    with _environment(WITHOUT_NVIDIA):
        try:
            return get_topology_desc("", "cuda", **kwargs).devices
        except NotImplementedError:  # JAX looked for plugins earlier, and asked for cuDNN
            importlib.import_module(_plugins()[0]).initialize()
            return get_topology_desc("", "cuda", **kwargs).devices


def lower(name: str, f: Callable[..., Any], *avals: Any) -> jax.stages.Lowered:
    """`f` on arrays of these shapes and dtypes, lowered for a target as it would be on it."""
    there = jax.sharding.SingleDeviceSharding(device(name))
    platform = device(name).platform
    with assume_platform(platform, (9, 0) if platform == "gpu" else None):
        return jax.jit(f, in_shardings=there, out_shardings=there).lower(*avals)


def compiled(lowered: jax.stages.Lowered, name: str) -> jax.stages.Compiled:
    """The machine code of what was lowered for a target.

    Never from JAX's cache on disk: a compiler without its machine cannot read an entry back.
    """
    before = jax.config.jax_enable_compilation_cache
    try:
        _use_cache(False)
        return lowered.compile(compiler_options=OPTIONS[device(name).platform])
    finally:
        _use_cache(before)


def _use_cache(wanted: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", wanted)
    compilation_cache.reset_cache()  # which has it look at the setting again


def _plugins() -> list[str]:
    here = find_spec("jax_plugins") is not None
    return [plugin for plugin in PLUGINS if here and find_spec(plugin) is not None]


@contextmanager
def _environment(wanted: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
