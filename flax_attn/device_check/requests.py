"""Every backend that accepts a request, against the plain formula in float64.

Outputs and all gradients are compared. The limit is the same as for a port: a few times the plain
formula's own error in the working dtype on this device. Float32 products are IEEE products.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attend import attend, explain
from ..bench.proof import against
from ..bench.task import Arrays
from ..parity.cases.workers import Failure, LastResult, Workers
from .part import Part
from .random_requests import DrawnRequest, draw_request

COUNT, FEW = 60, 8
Row = dict[str, Any]


class Item(NamedTuple):
    """A request by its index; `backends` are those still to run, None for all."""

    number: int
    small: bool
    backends: tuple[str, ...] | None = None


def run(part: Part) -> None:
    """Writes a row for each request and backend, including refusals."""
    count = FEW if part.small else COUNT
    with Workers(part.processes()) as workers:
        results = workers.map(_checked, [Item(i, part.small) for i in range(count)])
        for i, result in enumerate(part.in_time(results, count, "requests")):
            rows = _rows(result)
            while untried := rows[-1].pop("untried", None) if rows else None:
                with Workers() as others:  # those above are busy with other requests
                    rows += _rows(others.call(_checked, Item(i, part.small, tuple(untried))))
            for row in rows:
                part.write(request=i, of=count, **row)


def _rows(result: Any) -> list[Row]:
    """Returns the rows of a request, or one row with its failure."""
    if isinstance(result, Failure):
        return [{"backend": "-", "verdict": "failed", "text": result.text}]
    return result


def _checked(item: Item) -> list[Row] | LastResult:
    """Returns the rows of one request, up to a failing backend, which may break the device."""
    request = draw_request(item.number, item.small)
    arrays = request.arrays()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = computed(request, wide, "reference")
    rows: list[Row] = []
    with jax.default_matmul_precision("highest"):
        plain = computed(request, arrays, "reference")
        q, k, v = (jax.ShapeDtypeStruct(arrays[x].shape, request.dtype) for x in "qkv")
        verdicts: Any = explain(q, k, v, **request.rules(arrays))  # type: ignore[arg-type]
        verdicts = [v for v in verdicts if item.backends is None or v.backend in item.backends]
        for at, (backend, refusal) in enumerate((v.backend, v.refusal) for v in verdicts):
            row = {"words": request.words, "backend": backend, "dtype": request.dtype}
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
            rows.append({**row, "verdict": verdict, "share": share, "text": proof.wrong})
    return rows


def computed(request: DrawnRequest, arrays: Arrays, backend: str) -> Arrays:
    """Output and gradients of q, k, v and sinks, computed by one backend."""

    def attention(inputs: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (inputs[name] for name in "qkv")
        return attend(q, k, v, backend=backend, **request.rules(inputs))

    @jax.jit
    def both(inputs: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        out, back = jax.vjp(attention, inputs)
        return out, back(cotangent)[0]

    inputs = {name: jnp.asarray(x) for name, x in arrays.items() if name != "cotangent"}
    out, grads = both(inputs, jnp.asarray(arrays["cotangent"]))
    return {"output": np.asarray(out), **{name: np.asarray(x) for name, x in grads.items()}}
