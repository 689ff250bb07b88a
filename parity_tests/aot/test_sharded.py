"""Programs over several machines compile, forward and backward: a slice of TPUs, and two H200."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from flax_attn import CAUSAL, attend
from flax_attn.sharding import context_parallel
from flax_attn.where import assume_platform

from .programs import both_ways
from .targets import compiled, devices

T, N, K, H = 2048, 4, 4, 128
MESHES = {"v5e": (2, 2), "h200": (1, 2)}  # data and seq
COLLECTIVES = r"\b(all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
SENT = {
    "ring": "collective-permute",
    "all_gather": "all-gather",
    "ulysses": "all-to-all",
}
of_both_targets = pytest.mark.parametrize("target", MESHES, indirect=True)


def text_of(target: str, spec: P, **how: object) -> str:
    """The machine code of attention whose arrays lie so."""
    shape = MESHES[target]
    grid = np.asarray(devices(target, math.prod(shape))).reshape(shape)
    mesh = Mesh(grid, ("data", "seq"), axis_types=(AxisType.Explicit,) * 2)
    q, k = (
        jax.ShapeDtypeStruct((4, T, n, H), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for n in (N, K)
    )
    run = jax.jit(both_ways(lambda q, k, v: attend(q, k, v, mask=CAUSAL, **how)))
    platform = grid.flat[0].platform
    with assume_platform(platform, (9, 0) if platform == "gpu" else None):
        lowered = run.lower(q, k, k)
    return compiled(lowered, target).as_text() or ""


@pytest.mark.parametrize("strategy", SENT)
@of_both_targets
def test_a_sharded_length_by_each_strategy(target, strategy):
    with context_parallel(strategy):
        text = text_of(target, P("data", "seq"), backend="blockwise")
    assert SENT[strategy] in re.findall(COLLECTIVES, text)


@of_both_targets
def test_batch_and_heads_by_the_kernel_that_is_chosen(target):
    text = text_of(target, P("data", None, "seq"), backend="auto")
    assert re.findall(COLLECTIVES, text) == []
    assert {"v5e": "tpu_custom_call", "h200": "__cudnn$fmha"}[target] in text
