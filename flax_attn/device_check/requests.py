"""Every backend that accepts a request, against the plain formula in float64.

Outputs and all gradients are compared. The limit is the same as for a port: a few times the plain
formula's own error in the working dtype on this device. Float32 products are IEEE products there.
Then the backends that are equal are timed in turns with blockwise, at JAX's own precision, by one
process at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attend import attend, explain
from ..backends.device_file import ANY, kind_of
from ..bench.program import JaxProgram
from ..bench.proof import against, first_call
from ..bench.race import Entry, Settings, time_interleaved
from ..bench.result import TIMED, interval, ratios
from ..bench.result import Row as Timings
from ..bench.task import PASSES, Arrays
from ..parity.cases.workers import Failure, LastResult, Workers
from ..rules import Request, rules_of
from .part import Part
from .random_requests import DrawnRequest, draw_request

COUNT, FEW = 60, 8
UNTIMED = ("reference", "autodiff")  # of which "auto" takes neither for its speed beside blockwise
SETTINGS = Settings(rounds=15, seconds=0.5)
LOCK = "timing.lock"
LONGEST = 3.0  # seconds of a call, beyond which it is not timed, as a kernel interpreted on a CPU
Row = dict[str, Any]


class Item(NamedTuple):
    """A request by its index; `backends` are those still to run, None for all."""

    number: int
    small: bool
    backends: tuple[str, ...] | None = None
    lock: Path | None = None


def run(part: Part) -> None:
    """Writes a row for each request and backend, including refusals, then rows of times."""
    count = FEW if part.small else COUNT
    equal: dict[int, list[str]] = {}
    with Workers(part.processes()) as workers:
        results = workers.map(_checked, [Item(i, part.small) for i in range(count)])
        for i, result in enumerate(part.in_time(results, count, "requests")):
            rows = _rows(result, i, part.small)
            while untried := rows[-1].pop("untried", None) if rows else None:
                with Workers() as others:  # those above are busy with other requests
                    result = others.call(_checked, Item(i, part.small, tuple(untried)))
                    rows += _rows(result, i, part.small)
            for row in rows:
                part.write(request=i, of=count, **row)
            names = [row["backend"] for row in rows if row["verdict"] == "equal"]
            names = [name for name in names if name not in UNTIMED]
            equal |= {i: names} if "blockwise" in names and len(names) > 1 else {}
        if equal and part.seconds_left <= 0:
            part.leave_out(f"times of {len(equal)} requests")
            return
        lock = part.out / LOCK
        timed = [Item(i, part.small, tuple(names), lock) for i, names in equal.items()]
        results = part.in_time(workers.map(_timed, timed), len(timed), "requests to time")
        for item, result in zip(timed, results, strict=False):
            for row in _rows(result, item.number, part.small):
                which = {"request": item.number, "of": count}
                part.write(**(which if "verdict" in row else {"timed": item.number}), **row)
        lock.unlink(missing_ok=True)


def _rows(result: Any, number: int, small: bool) -> list[Row]:
    """Returns the rows of a request, or one row with its failure, which counts against its kind."""
    if not isinstance(result, Failure):
        return result
    with Workers() as workers:  # the one before may have ended, and this process computes nothing
        kind: Any = workers.call(_kind, Item(number, small))
    row = {"backend": ANY, "verdict": "failed", "text": result.text}
    return [row if isinstance(kind, Failure) else {**row, "kind": kind}]


def _kind(item: Item) -> str:
    request = draw_request(item.number, item.small)
    return _kind_of(request, request.arrays())


def _kind_of(request: DrawnRequest, arrays: Arrays) -> str:
    q, k, v = (jax.ShapeDtypeStruct(arrays[x].shape, request.dtype) for x in "qkv")
    return kind_of(Request.of(q, k, v, rules_of(**request.rules(arrays))))


def _checked(item: Item) -> list[Row] | LastResult:
    """Returns the rows of one request, up to a failing backend, which may break the device."""
    request = draw_request(item.number, item.small)
    arrays = request.arrays()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = computed(request, wide, "reference")
    rows: list[Row] = []
    kind = _kind_of(request, arrays)
    with jax.default_matmul_precision("highest"):
        plain = computed(request, arrays, "reference")
        q, k, v = (jax.ShapeDtypeStruct(arrays[x].shape, request.dtype) for x in "qkv")
        verdicts: Any = explain(q, k, v, **request.rules(arrays))  # type: ignore[arg-type]
        verdicts = [v for v in verdicts if item.backends is None or v.backend in item.backends]
        for at, (backend, refusal) in enumerate((v.backend, v.refusal) for v in verdicts):
            row = {"words": request.words, "backend": backend, "dtype": request.dtype, "kind": kind}
            if refusal is not None:
                rows.append({**row, "verdict": "refuses", "text": refusal})
                continue
            try:
                results = plain if backend == "reference" else computed(request, arrays, backend)
            except Exception as error:  # a kernel that fails to compile may raise anything
                text = f"{type(error).__name__}: {str(error).strip()[:2000]}"
                untried = [v.backend for v in verdicts[at + 1 :]]
                rows.append({**row, "verdict": "failed", "text": text, "untried": untried})
                return LastResult(rows)
            proof = against(results, plain, truth, request.dtype)
            share = proof.error / proof.limit if proof.limit else float(proof.error > 0)
            verdict = "equal" if proof.ok else "different"
            output = against(results, plain, {"output": truth["output"]}, request.dtype)
            row |= {"forward": output.ok, "backward": proof.ok}
            rows.append({**row, "verdict": verdict, "share": share, "text": proof.wrong})
    return rows


def _timed(item: Item) -> list[Row] | LastResult:
    """Rows of a request's times: by pass the median of seconds, and of the ratio to blockwise's."""
    request = draw_request(item.number, item.small)
    arrays = request.arrays()
    row = {"words": request.words, "dtype": request.dtype, "kind": _kind_of(request, arrays)}
    times: dict[str, Row] = {}
    backend = ANY
    try:
        for which in PASSES:
            programs = {}
            for backend in item.backends or ():
                program = JaxProgram(partial(_attention, request, backend), which)
                placed = program.place(arrays)
                program.compile(placed)
                programs[backend] = program, placed
            backend = ANY
            with _alone(item.lock):
                timings = _timings(programs)
            for name, mine in timings.items() if "blockwise" in timings else ():
                base = timings["blockwise"]
                figures = {"ratio": ratios(mine, base)[0], "interval": interval(mine, base)}
                times.setdefault(name, {})[which] = {"seconds": mine.amount, **figures}
    except Exception as error:  # a kernel that fails to compile may raise anything
        text = f"while timed, {type(error).__name__}: {str(error).strip()[:2000]}"
        return LastResult([{**row, "backend": backend, "verdict": "failed", "text": text}])
    return [{**row, "backend": name, "times": by_pass} for name, by_pass in times.items()]


def _timings(programs: dict[str, tuple[JaxProgram, Any]]) -> dict[str, Timings]:
    """The timings of compiled programs with their inputs, by backend."""
    entries = []
    for name, (program, placed) in programs.items():
        figures = {"first_seconds": first_call(program, placed)[1]}
        row = Timings("", {}, name, "flax_attn", status=TIMED, figures=figures)
        if figures["first_seconds"] <= LONGEST:
            entries.append(Entry(row, program, [placed]))
    time_interleaved(entries, SETTINGS)
    return {entry.row.competitor: entry.row for entry in entries}


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Waits until no other process times: they share a device."""
    if path is None or find_spec("fcntl") is None:
        yield
        return
    fcntl = import_module("fcntl")
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _attention(request: DrawnRequest, backend: str, inputs: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (inputs[name] for name in "qkv")
    return attend(q, k, v, backend=backend, **request.rules(inputs))


def computed(request: DrawnRequest, arrays: Arrays, backend: str) -> Arrays:
    """Output and gradients of q, k, v and sinks, computed by one backend."""

    @jax.jit
    def both(inputs: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        out, back = jax.vjp(partial(_attention, request, backend), inputs)
        return out, back(cotangent)[0]

    inputs = {name: jnp.asarray(x) for name, x in arrays.items() if name != "cotangent"}
    out, grads = both(inputs, jnp.asarray(arrays["cotangent"]))
    return {"output": np.asarray(out), **{name: np.asarray(x) for name, x in grads.items()}}
