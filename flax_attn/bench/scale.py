"""Per-device cost of attention over several devices, from compiled programs; nothing is timed.

A device's memory is the compiler's own figure, and sent bytes are counted in the traced program.
Both are the same on devices simulated by one CPU, so no hardware is needed. Before counting,
outputs and gradients of each strategy and layout are verified at a shorter length.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._internal.devices import fake_devices
from ..attend import attend
from ..sharding import context_parallel, place, positions, unplace
from .cells import Table, bytes_of, times
from .competitor import OWN_FAMILY, first_line
from .proof import Arrays, Proof, judged
from .result import LEFT_OUT, MEASURED, WRONG, Row
from .workload import BOTH, COTANGENT, Workload, platform

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
Way = tuple[str, str]


def workloads(
    lengths: Sequence[int], heads: int, width: int, devices: Sequence[int]
) -> list[Workload]:
    """Returns every length on one device and on each number of devices."""
    one = Workload(1, width, heads, devices=1)
    return [replace(one, length=n, devices=d) for n in lengths for d in (1, *devices)]


def rerun_on_devices(arguments: Sequence[str], devices: int) -> int | None:
    """Reruns the command with a CPU simulating `devices` devices; None if there are enough.

    The new process gets Ctrl-C once, from here, and ends by itself, with what it has.

    Raises:
      ValueError: if there are too few accelerators.
    """
    if jax.device_count() >= devices:
        return None
    if platform() != "cpu":
        raise ValueError(
            f"--preset scale goes over {devices} devices, and here are {jax.device_count()}: with "
            "JAX_PLATFORMS=cpu one CPU stands for all of them."
        )
    command = [sys.executable, "-m", "flax_attn", "bench", *arguments]
    settings = {**os.environ, **fake_devices(devices)}
    with subprocess.Popen(command, env=settings, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            return process.wait()


class ShardedProgram:
    """Causal attention over the devices of a workload, forward or with gradients.

    Args:
      way: strategy and layout.
      w: the sizes.
      which: the pass.
    """

    def __init__(self, way: Way, w: Workload, which: str):
        self.way, self.w, self.sharding = way, w, None
        if way != ALONE:
            mesh = jax.make_mesh((w.devices,), (AXIS,), devices=jax.devices()[: w.devices])
            self.sharding = NamedSharding(mesh, PartitionSpec(None, AXIS))

        def function(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
            if which != BOTH:
                return (self.attention(q, k, v),)
            out, back = jax.vjp(self.attention, q, k, v)
            return out, *back(cotangent)

        self.function = function

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        """Attention of tokens in the order of the layout."""
        if self.sharding is None:
            return attend(q, k, v, mask=self.w.rule)
        with context_parallel(self.way[0], layout=self.way[1]):
            return attend(q, k, v, mask=self.w.rule)

    def shapes(self) -> list[Any]:
        """Shapes and shardings of the function's arguments."""
        w = self.w
        x = jax.ShapeDtypeStruct(
            (w.batch, w.length, w.heads, w.width), w.dtype, sharding=self.sharding
        )
        return [x] * 4

    def results(self) -> Arrays:
        """Output and gradients for the workload's arrays, in token order."""
        arrays, cut = self.w.arrays(), (self.w.devices, self.way[1])
        names = ("q", "k", "v", COTANGENT)
        inputs = [jax.device_put(place(arrays[x], *cut, axis=1), self.sharding) for x in names]
        out = [unplace(np.asarray(x), *cut, axis=1) for x in jax.jit(self.function)(*inputs)]
        return dict(zip(("output", *names[:3]), out, strict=False))


@cache
def proven(way: Way, w: Workload, which: str) -> Proof:
    """Verifies against the plain formula in float64, on at most `PROVEN` tokens per device."""
    small = replace(w, length=min(w.length, PROVEN * w.devices))
    return judged(ShardedProgram(way, small, which).results(), small, which)


class CountRace:
    """Like `Race`, but compiles each strategy and layout and counts its costs without timing."""

    def run(self, w: Workload, which: str, rows: list[Row], notify: Any = lambda _: None) -> None:
        """Appends a row for each strategy and layout to `rows`."""
        for way in (ALONE,) if w.devices == 1 else WAYS:
            row = Row(w, which, ", ".join(way) if way != ALONE else way[0], OWN_FAMILY)
            rows.append(row)
            notify(f"{w.devices} devices, {row.competitor}")
            try:
                _fill_counts(way, row)
            except Exception as error:  # its message says which sizes fit
                row.status, row.reason = LEFT_OUT, first_line(error)


def _fill_counts(way: Way, row: Row) -> None:
    w, which = row.workload, row.which
    proof = proven(way, w, which)
    row.proof = {"error": proof.error, "limit": proof.limit}
    if not proof.ok:
        row.status, row.reason = WRONG, proof.wrong
        return
    spread, start = ShardedProgram(way, w, which), time.perf_counter()
    traced = jax.jit(spread.function).trace(*spread.shapes())
    compiled = traced.lower().compile()
    row.compile_seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    row.temporary = int(memory.temp_size_in_bytes)
    each = blocks(way, w)
    row.counts = {"blocks": float(each.max()), "mean": float(each.mean())}
    row.counts["sent"] = sent(traced.jaxpr.jaxpr, w.devices)
    row.status = MEASURED


def blocks(way: Way, w: Workload) -> np.ndarray:
    """Number of query-key blocks with visible pairs on each device, over all its heads."""
    strategy, layout = way
    size = min(BLOCK, max(1, w.length // (2 * w.devices)))
    at = positions(w.length, w.devices, layout).reshape(w.devices, -1, size)
    visible = at.max(-1)[:, :, None] >= at.min(-1).reshape(-1)
    each = visible.sum((1, 2)) * w.heads
    return np.full(w.devices, each.sum() / w.devices) if strategy == "ulysses" else each


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


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns a table of memory, blocks and sent bytes for each length."""
    header = ["devices", "strategy, layout", "pass", "memory", "of one device", "blocks a device"]
    header += ["busiest / mean", "sent", "a hop", "error / limit"]
    tables = []
    for length, group in groupby(rows, key=lambda row: row.workload.length):
        race = [row for row in group if row.status == MEASURED]
        alone = {row.which: row.temporary for row in race if row.workload.devices == 1}
        cells = [_cells(row, alone.get(row.which)) for row in race]
        title = title_of(replace(rows[0].workload, length=length))
        tables.append(Table(title, header, cells))
    return tables


def title_of(w: Workload) -> str:
    """Title of the table of one length."""
    sizes = f"T {w.length}, {w.heads} heads of width {w.width}, {w.describe_mask}, {w.dtype}"
    return f"a device of several, {sizes}"


def _cells(row: Row, alone: int | None) -> list[str]:
    n, counts = row.workload.devices, row.counts
    proof = "" if row.proof is None else f"{row.proof['error']:.1e} / {row.proof['limit']:.1e}"
    cells = [str(n), row.competitor, row.which, bytes_of(row.temporary)]
    cells += [times(row.temporary / alone) if row.temporary and alone else ""]
    cells += [f"{counts['blocks']:,.0f}", times(counts["blocks"] / counts["mean"])]
    hops = [bytes_of(int(counts["sent"] / part)) for part in (1, n - 1) if n > 1]
    return [*cells, *(hops or ["", ""]), proof]
