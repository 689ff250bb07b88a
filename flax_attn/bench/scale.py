"""Per-device cost of attention over several devices, from compiled programs; nothing is timed.

A device's memory is the compiler's own figure, and sent bytes are counted in the traced program.
Both are the same on devices simulated by one CPU, so no hardware is needed. Before counting,
outputs and gradients of each strategy and layout are verified at a shorter length.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..attend import attend
from ..sharding import context_parallel, place, positions, unplace
from .attention import Attention
from .competitor import OWN_FAMILY, Competitor
from .program import Program
from .proof import Proof, judged
from .task import BOTH, COTANGENT, Arrays

AXIS = "seq"
ALONE = ("one device", "contiguous")
WAYS = (
    ("all_gather", "contiguous"),
    ("all_gather", "zigzag"),
    ("ring", "contiguous"),
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("ulysses", "contiguous"),
)
PROVEN = 128  # tokens per device: from 128 on "auto" computes in blocks
BLOCK = 128  # tokens per counted block
Way = tuple[str, str]  # strategy and layout


@dataclass(frozen=True)
class Sharded(Attention):
    """Causal attention over one device and over several; each number of them is a competitor."""

    @property
    def table(self) -> str:
        return (
            f"a device of several, {self.heads} heads of width {self.width}, causal, {self.dtype}"
        )

    @property
    def cells(self) -> dict[str, str]:
        return {"T": str(self.length), "pass": self.which}

    def proof_inputs(self) -> Arrays:
        return {}  # large, and only counted


def competitors(devices: Sequence[int]) -> list[Competitor]:
    """Returns one device alone, then every strategy and layout over each number of devices."""
    alone = [_competitor(ALONE[0], ALONE, 1)]
    return alone + [_competitor(f"{n} x {', '.join(way)}", way, n) for n in devices for way in WAYS]


def _competitor(name: str, way: Way, devices: int) -> Competitor:
    build = partial(ShardedProgram, way, devices)
    return Competitor(name, OWN_FAMILY, build, prove=partial(_prove, way, devices))


def make_devices(count: int) -> None:
    """Makes one CPU stand for several devices, unless JAX has begun or XLA_FLAGS say so.

    Raises:
      ValueError: if there are too few devices.
    """
    with suppress(RuntimeError):  # JAX has begun
        jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise ValueError(
            f"--preset scale goes over {count} devices, and here are {jax.device_count()}: with "
            "JAX_PLATFORMS=cpu one CPU stands for all of them."
        )


class ShardedProgram(Program):
    """Causal attention over several devices; compiled and counted, never run by a race.

    Args:
      way: strategy and layout.
      devices: number of devices.
      task: the sizes.
    """

    def __init__(self, way: Way, devices: int, task: Sharded):
        self.way, self.devices, self.task, self.sharding = way, devices, task, None
        if way != ALONE:
            mesh = jax.make_mesh((devices,), (AXIS,), devices=jax.devices()[:devices])
            self.sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))

        def function(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            if task.which != BOTH:
                return (self.attention(q, k, v),)
            out, back = jax.vjp(self.attention, q, k, v)
            return out, *back(cotangent)

        self.function = function

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        """Attention of tokens in the order of the layout."""
        if self.sharding is None:
            return attend(q, k, v, mask=self.task.rule)
        with context_parallel(self.way[0], layout=self.way[1]):
            return attend(q, k, v, mask=self.task.rule)

    def results(self) -> Arrays:
        """Output and gradients for the task's inputs, in token order."""
        arrays, cut = self.task.inputs(), (self.devices, self.way[1])
        names = ("q", "k", "v", COTANGENT)
        inputs = [jax.device_put(place(arrays[x], *cut, axis=1), self.sharding) for x in names]
        out = [unplace(np.asarray(x), *cut, axis=1) for x in jax.jit(self.function)(*inputs)]
        return dict(zip(("output", *names[:3]), out, strict=False))

    def place(self, inputs: Arrays) -> Any:
        """Shapes and shardings of the function's arguments."""
        shape, dtype = self.task.shapes()["q"], self.task.dtype
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)] * 4

    def compile(self, placed: Any) -> None:
        start = time.perf_counter()
        traced = jax.jit(self.function).trace(*placed)
        memory: Any = traced.lower().compile().memory_analysis()
        self.compile_seconds = time.perf_counter() - start
        self.temporary = int(memory.temp_size_in_bytes)
        each = blocks(self.way, self.task, self.devices)
        self.counts = {"blocks": float(each.max()), "mean": float(each.mean())}
        if self.devices > 1:
            total = sent(traced.jaxpr.jaxpr, self.devices)
            self.counts |= {"sent": total, "hops": self.devices - 1}


@cache
def _prove(way: Way, devices: int, task: Sharded) -> Proof:
    """Verifies against the plain formula in float64, on at most `PROVEN` tokens per device."""
    small = replace(task, length=min(task.length, PROVEN * devices))
    program = ShardedProgram(way, devices, small)
    whole = Attention(small.length, small.width, small.heads, which=small.which, seed=small.seed)
    return judged(program.results(), whole)


def blocks(way: Way, task: Sharded, devices: int) -> np.ndarray:
    """Number of query-key blocks with visible pairs on each device, over all its heads."""
    strategy, layout = way
    size = min(BLOCK, max(1, task.length // (2 * devices)))
    at = positions(task.length, devices, layout).reshape(devices, -1, size)
    visible = at.max(-1)[:, :, None] >= at.min(-1).reshape(-1)
    each = visible.sum((1, 2)) * task.heads
    return np.full(devices, each.sum() / devices) if strategy == "ulysses" else each


def sent(jaxpr: Any, devices: int) -> float:
    """Bytes that a device sends in a traced program, counting every step of a scan."""
    return sum(times * _sent(eqn, devices) for eqn, times in _equations(jaxpr, 1))


def _sent(eqn: Any, n: int) -> float:
    def size(variables: Any) -> float:
        return sum(x.aval.size * x.aval.dtype.itemsize for x in variables)

    match eqn.primitive.name.removesuffix("_invariant"):
        case "ppermute":
            return size(eqn.invars)
        case "all_gather":
            return size(eqn.invars) * (n - 1)
        case "reduce_scatter":
            return size(eqn.outvars) * (n - 1)
        case "all_to_all":
            return size(eqn.invars) * (n - 1) / n
        case "psum" | "psum2":
            return size(eqn.invars) * 2 * (n - 1) / n
    return 0.0


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Yields every equation and the number of times it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        each = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(
            [*eqn.params.values()], is_leaf=lambda x: _inner(x) is not None
        ):
            inner = _inner(value)
            if inner is not None:
                yield from _equations(inner, each)


def _inner(value: Any) -> Any:
    """Returns the jaxpr inside a parameter of an equation, or None."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None
