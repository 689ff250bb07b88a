"""Rows of module state after a call: running statistics, counters and buffers."""

import numpy as np

from .. import judge
from ..report import Row
from ..sides.pair import Pair
from ..sides.run import Run, bessel_excess

BIASED = "{}: nnx keeps the biased variance, torch the unbiased one (n / (n - 1)); equal up to that"
ONE_SIDED = (
    "a call changes {} in {} alone: it is not compared, since {} keeps no variable of that name"
)
# Torch counts the batches of its norm layers, which matters only if momentum is None.
IGNORED_STATE = ("num_batches_tracked",)


def states(
    pair: Pair, got: Run, torch_run: Run, dtype: str, mode: str, rows: list[Row], notes: dict
) -> None:
    """Compares both sides' state after the call, where it is mapped or the call changes it.

    In float64; state that only one side has and changes is noted.
    """
    carried = pair.names.carried({**pair.narrow("float64"), **torch_run.state})
    uncarried = {pair.names.tap(name): name for name in torch_run.state if name not in carried}
    for path, name in uncarried.items():
        if path in carried or path not in got.state:
            continue
        if dtype == "float64" and (path in got.changed or name in torch_run.changed):
            verdict = _compare_state(got.state[path], torch_run.state[name])
            rows.append(Row(path, "state", dtype, mode, verdict))
    moves = pair.plan.moves if pair.plan else ()
    changed = any(name in torch_run.changed for move in moves for name in move.sources)
    changed = changed or not set(carried).isdisjoint(got.changed)
    if dtype == "float64" and (pair.request.train or changed):
        statistics(pair, got, torch_run, dtype, mode, rows, notes)
    alone = {path for path in got.changed if path not in carried and path not in uncarried}
    notes |= {ONE_SIDED.format(path, "Flax", "torch"): None for path in sorted(alone)}
    vmap_leading = {name for move in moves for name in move.sources}
    for name in (name for name in torch_run.changed if name not in vmap_leading):
        path = pair.names.tap(name)
        if path not in got.state and name.rpartition(".")[2] not in IGNORED_STATE:
            if path not in carried:
                notes[ONE_SIDED.format(name, "torch", "Flax")] = None


def _compare_state(got: np.ndarray, want: np.ndarray) -> judge.Verdict:
    """Compares floating values by error, all others by equality."""
    if want.dtype.kind in "fc" and got.dtype.kind in "fc":
        return judge.same_function(got, want, zero=True)
    return judge.same_values(got, want)


def statistics(
    pair: Pair, got: Run, torch_run: Run, dtype: str, mode: str, rows: list[Row], notes: dict
) -> None:
    """Compares both sides' running statistics after the call.

    A running variance may follow either convention: torch averages the unbiased variance, nnx the
    biased one.
    """
    new = pair.names.carried({**pair.narrow("float64"), **torch_run.state})
    bessel = pair.names.carried(_bessel(torch_run))
    for path, value in got.state.items():
        if path not in new:
            continue
        verdict = judge.same_function(value, new[path])
        if verdict.differs and path in bessel:
            biased = judge.same_function(value, new[path] - bessel[path])
            if biased.ok:
                verdict = biased
                notes[BIASED.format(path)] = None
        rows.append(Row(path, "state", dtype, mode, verdict))


def _bessel(torch_run: Run) -> dict[str, np.ndarray]:
    """`torch_run.bessel`; a recording of an earlier version has it in the calls only."""
    excess = dict(torch_run.bessel)
    for name, call in () if excess else torch_run.calls.items():
        momentum, state = call.facts.get("momentum"), f"{name.partition('#')[0]}.running_var"
        if state in torch_run.changed and momentum is not None:
            excess[state] = bessel_excess(call.inputs["0"], momentum, excess.get(state, 0.0))
    return excess
