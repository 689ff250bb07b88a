"""Verifies a competitor's results before it is timed, at the same sizes.

The truth is the plain formula in float64, on inputs rounded to the working dtype; `parity.judge`
bounds a competitor's error by the plain formula's own error in that dtype. Of a task that is too
large only a part is verified, and also all of a smaller one.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..parity import judge
from .program import Program
from .task import Arrays, Task

if TYPE_CHECKING:
    from ..parity.report import Report


class Proof(NamedTuple):
    """The error largest relative to its limit, that limit, and a message if it is exceeded."""

    error: float
    limit: float
    wrong: str = ""

    @property
    def ok(self) -> bool:
        """Whether every error is within its limit."""
        return not self.wrong


def prove_at(build: Callable[[Any], Program], task: Task) -> Proof:
    """Builds and compiles a program of a task, and verifies it."""
    program = build(task)
    placed = program.place(task.proof_inputs())
    program.compile(placed)
    return judged_call(program, placed, task)[0]


def judged_call(program: Program, placed: Any, task: Task) -> tuple[Proof, float]:
    """Verifies the first call of a compiled program; returns the proof and the seconds it took."""
    result, took = first_call(program, placed)
    return judged(program.take(result), task), took


def first_call(program: Program, placed: Any) -> tuple[Any, float]:
    """Returns the result and the seconds until it was ready."""
    start = time.perf_counter()
    result = program.run(placed)
    program.wait(result)
    return result, time.perf_counter() - start


def judged(results: Arrays, task: Task) -> Proof:
    """Verifies an output and, after a backward pass, all gradients."""
    baseline, truth = task.references()
    return against(task.verified(results), baseline, truth, task.dtype)


def against(results: Arrays, baseline: Arrays, truth: Arrays, dtype: str) -> Proof:
    """Verifies all that `truth` has, given the plain formula's results in `dtype` as `baseline`."""
    worst = Proof(0.0, np.inf)
    for name, verdict in _verdicts(results, baseline, truth, dtype):
        if not verdict.ok:
            return Proof(verdict.error, verdict.limit, _sentence(name, verdict))
        if verdict.error * worst.limit >= worst.error * verdict.limit or worst.limit == np.inf:
            worst = Proof(verdict.error, verdict.limit)
    return worst


def _verdicts(
    results: Arrays, baseline: Arrays, truth: Arrays, dtype: str
) -> Iterator[tuple[str, judge.Verdict]]:
    out = results["output"]
    yield "output", judge.same_precision(out, baseline["output"], truth["output"], dtype)
    grads = {name: x for name, x in truth.items() if name != "output"}
    if not grads:
        return
    scale = judge.whole_gradient(list(grads.values()))
    differences = [baseline[name].astype(np.float64) - want for name, want in grads.items()]
    error = judge.whole_gradient(differences) / scale
    for name, want in grads.items():
        yield name, judge.within_precision(results[name], error, want, dtype, scale)


def _sentence(name: str, verdict: judge.Verdict) -> str:
    what = name if name == "output" else f"gradient of {name}"
    note = f" ({verdict.note})" if verdict.note else ""
    return f"{what} is off by {verdict.error:.1e}, the limit is {verdict.limit:.1e}{note}"


def proof_of(report: "Report") -> Proof:
    """The proof that a report of `compare` gives."""
    worst = max((row.verdict for row in report.rows), key=lambda v: v.error / (v.limit or 1.0))
    return Proof(worst.error, worst.limit, "" if report.ok else report.summary())
