"""Verifies a competitor's results before it is timed, at the same shapes.

The truth is the plain formula in float64, on inputs rounded to the working dtype; `parity.judge`
bounds a competitor's error by the plain formula's own error in that dtype. If there are too many
attention weights, only some rows are verified, with a cotangent that is zero in all others, and
also all rows of a smaller workload.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attend import attend
from ..parity import judge
from .program import Program
from .workload import BOTH, COTANGENT, PROJECTIONS, Workload

Arrays = dict[str, np.ndarray]


class Proof(NamedTuple):
    """The error largest relative to its limit, that limit, and a message if it is exceeded."""

    error: float
    limit: float
    wrong: str = ""

    @property
    def ok(self) -> bool:
        """Whether every error is within its limit."""
        return not self.wrong


def prove(program: Program, w: Workload, which: str) -> tuple[Proof, float]:
    """Runs a program on the first inputs of `w`; returns the proof and the seconds it took."""
    arrays, rows = w.arrays(), w.rows()
    placed = program.place(w.only(arrays, rows) if len(rows) < w.length else arrays)
    if program.compile_seconds is None:
        program.compile(placed)
    result, took = first_call(program, placed)
    return judged(program.take(result), w, which), took


def first_call(program: Program, placed: Any) -> tuple[Any, float]:
    """Returns the result and the seconds until it was ready."""
    start = time.perf_counter()
    result = program.run(placed)
    program.wait(result)
    return result, time.perf_counter() - start


def judged(results: Arrays, w: Workload, which: str) -> Proof:
    """Verifies an output and, after a backward pass, all gradients."""
    baseline, truth = references(w, str(jax.config.jax_default_matmul_precision))  # type: ignore
    return against(results, baseline, truth, w.dtype, which, w.rows())


def against(
    results: Arrays,
    baseline: Arrays,
    truth: Arrays,
    dtype: str,
    which: str,
    rows: Any = slice(None),
) -> Proof:
    """Verifies results, given the plain formula's results in `dtype` as `baseline`.

    `baseline` and `truth` contain only the verified rows of the output and of q's gradient.
    """
    worst = Proof(0.0, np.inf)
    for name, verdict in _verdicts(results, baseline, truth, dtype, rows, which):
        if not verdict.ok:
            return Proof(verdict.error, verdict.limit, _sentence(name, verdict))
        if verdict.error * worst.limit >= worst.error * verdict.limit or worst.limit == np.inf:
            worst = Proof(verdict.error, verdict.limit)
    return worst


def _verdicts(
    results: Arrays, baseline: Arrays, truth: Arrays, dtype: str, rows: Any, which: str
) -> Iterator[tuple[str, judge.Verdict]]:
    out = results["output"][:, rows]
    yield "output", judge.same_precision(out, baseline["output"], truth["output"], dtype)
    if which != BOTH:
        return
    grads = {name: x for name, x in truth.items() if name != "output"}
    scale = judge.whole_gradient(list(grads.values()))
    differences = [baseline[name].astype(np.float64) - want for name, want in grads.items()]
    error = judge.whole_gradient(differences) / scale
    for name, want in grads.items():
        got = results[name][:, rows] if name == "q" else results[name]
        yield name, judge.within_precision(got, error, want, dtype, scale)


def _sentence(name: str, verdict: judge.Verdict) -> str:
    what = name if name == "output" else f"gradient of {name}"
    note = f" ({verdict.note})" if verdict.note else ""
    return f"{what} is off by {verdict.error:.1e}, the limit is {verdict.limit:.1e}{note}"


@cache
def references(w: Workload, precision: str) -> tuple[Arrays, Arrays]:
    """The plain formula's output and gradients in the verified rows, in the dtype and float64."""
    arrays = w.arrays()
    with jax.enable_x64(True):
        truth = _plain_run(w, {name: x.astype(np.float64) for name, x in arrays.items()})
    return _plain_run(w, arrays), truth


def _plain_run(w: Workload, arrays: Arrays) -> Arrays:
    rows = w.rows()
    visible = np.broadcast_to(
        np.asarray(w.rule(0, 0, rows[:, None], np.arange(w.length)[None])), (len(rows), w.length)
    )
    cotangent = arrays[COTANGENT][:, rows]
    inputs = {name: x for name, x in arrays.items() if name != COTANGENT}
    formula = layer if w.layer else function

    @jax.jit
    def both(inputs: Any, cotangent: jax.Array, visible: jax.Array) -> Any:
        out, back = jax.vjp(lambda inputs: formula(inputs, rows, visible, w), inputs)
        return out, back(cotangent)[0]

    out, grads = jax.tree.map(np.asarray, both(inputs, cotangent, visible))
    if w.layer is None:
        grads["q"] = grads["q"][:, rows]
    return {"output": out, **grads}


def function(inputs: Any, rows: np.ndarray, visible: jax.Array, w: Workload) -> jax.Array:
    """Attention of q, k and v in the verified rows, one batch entry at a time."""
    return _entries(inputs["q"][:, rows], inputs["k"], inputs["v"], visible, w.options)


def layer(inputs: Any, rows: np.ndarray, visible: jax.Array, w: Workload) -> jax.Array:
    """`out(attention(query(x), key(x), value(x)))` in the verified rows."""

    def project(name: str, x: jax.Array) -> jax.Array:
        y = x @ inputs[f"{name}.weight"]
        return y + jnp.broadcast_to(inputs[f"{name}.bias"], y.shape)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-1], w.heads, w.width)

    x, (query, key, value, out) = inputs["x"], PROJECTIONS
    q = heads(project(query, x[:, rows]))
    o = _entries(q, heads(project(key, x)), heads(project(value, x)), visible, {})
    return project(out, o.reshape(*o.shape[:2], w.features))


def _entries(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, options: Any
) -> jax.Array:
    def one(inputs: Any) -> jax.Array:
        return attend(*inputs, mask=visible, backend="reference", **options)

    entry: Callable = jax.checkpoint(one)
    return jax.lax.map(entry, (q, k, v))
