"""Part three: every backend that accepts a request, against the plain formula in float64.

Outputs and all gradients are compared. The limit is the same as for a port: a few times the plain
formula's own error in the working dtype on this device. Float32 products are IEEE products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attend import attend, explain
from ..bench.proof import Arrays, against
from ..bench.workload import BOTH
from ..parity.cases.workers import Failure, LastResult, Workers
from .facts import processes
from .random_requests import DrawnRequest, draw_request
from .task import Task

COUNT, FEW = 60, 8
INPUTS = ("q", "k", "v", "sinks")
Row = dict[str, Any]


class Item(NamedTuple):
    """A request by its index; `backends` are those still to run, None for all."""

    number: int
    small: bool
    backends: tuple[str, ...] | None = None


def run(task: Task) -> None:
    """Writes a row for each request and backend, including refusals."""
    count = FEW if task.small else COUNT
    with Workers(processes(task)) as workers:
        results = workers.map(_checked, [Item(i, task.small) for i in range(count)])
        for i, result in enumerate(task.in_time(results, count, "requests")):
            for row in _with_remaining(_rows(result), i, task.small):
                task.write(request=i, **row)


def _rows(result: Any) -> list[Row]:
    """Returns the rows of a request, or one row with its failure."""
    if isinstance(result, Failure):
        return [{"backend": "-", "verdict": "failed", "text": result.text}]
    return result


def _with_remaining(rows: list[Row], number: int, small: bool) -> list[Row]:
    """Adds the rows of the backends after one that failed, computed in a new process."""
    while untried := rows[-1].pop("untried", None) if rows else None:
        with Workers() as workers:  # the shared ones are busy with other requests
            rows += _rows(workers.call(_checked, Item(number, small, tuple(untried))))
    return rows


def _checked(item: Item) -> list[Row] | LastResult:
    """Returns the rows of one request, up to a failing backend, which may break the device."""
    drawn_request = draw_request(item.number, item.small)
    arrays = drawn_request.arrays()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = _computed(drawn_request, wide, "reference")
    rows: list[Row] = []
    with jax.default_matmul_precision("highest"):
        plain = _computed(drawn_request, arrays, "reference")
        refusals = _refusals(drawn_request, arrays)
        backends = [name for name in refusals if item.backends is None or name in item.backends]
        for at, backend in enumerate(backends):
            facts = {"words": drawn_request.words, "backend": backend, "dtype": drawn_request.dtype}
            if refusals[backend] is not None:
                rows.append({**facts, "verdict": "refuses", "text": refusals[backend]})
                continue
            rows.append({**facts, **_judged(drawn_request, arrays, backend, plain, truth)})
            if rows[-1]["verdict"] == "failed":
                rows[-1]["untried"] = backends[at + 1 :]
                return LastResult(rows)
    return rows


def _refusals(drawn_request: DrawnRequest, arrays: Arrays) -> dict[str, str | None]:
    """Returns, by backend, why it refuses the request, or None."""
    shape: Any = jax.ShapeDtypeStruct  # `explain` reads only shapes and dtypes
    q, k, v = (shape(arrays[x].shape, drawn_request.dtype) for x in "qkv")
    verdicts = explain(q, k, v, mask=drawn_request.mask, **_options(drawn_request, arrays))
    return {verdict.backend: verdict.refusal for verdict in verdicts}


def _options(drawn_request: DrawnRequest, arrays: Any) -> dict[str, Any]:
    more = {"sinks": jnp.asarray(arrays["sinks"])} if "sinks" in arrays else {}
    return {"score": drawn_request.score, **drawn_request.options, **more}


def _judged(
    drawn_request: DrawnRequest, arrays: Arrays, backend: str, plain: Arrays, truth: Arrays
) -> Row:
    try:
        results = plain if backend == "reference" else _computed(drawn_request, arrays, backend)
    except Exception as error:  # a kernel that fails to compile may raise anything
        text = f"{type(error).__name__}: {str(error).strip()[:2000]}"
        return {"verdict": "failed", "text": text}
    proof = against(results, plain, truth, drawn_request.dtype, BOTH)
    verdict = "equal" if proof.ok else "different"
    text = {} if proof.ok else {"text": proof.wrong}
    share = proof.error / proof.limit if proof.limit else float(proof.error > 0)
    return {"verdict": verdict, "share": share, **text}


def _computed(drawn_request: DrawnRequest, arrays: Arrays, backend: str) -> Arrays:
    """Output and gradients of q, k, v and sinks, computed by one backend."""
    inputs = {name: jnp.asarray(arrays[name]) for name in INPUTS if name in arrays}
    out, grads = jax.jit(_both(drawn_request, backend))(inputs, jnp.asarray(arrays["cotangent"]))
    return {"output": np.asarray(out), **{name: np.asarray(x) for name, x in grads.items()}}


def _both(drawn_request: DrawnRequest, backend: str) -> Callable[[Any, jax.Array], Any]:
    def attention(inputs: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (inputs[name] for name in "qkv")
        return attend(
            q, k, v, mask=drawn_request.mask, backend=backend, **_options(drawn_request, inputs)
        )

    def both(inputs: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        out, back = jax.vjp(attention, inputs)
        return out, back(cotangent)[0]

    return both
