"""Fault trials: runs torch's own module with one of its operations done wrong.

Finds faults that no tap shows: if torch with a mistake returns exactly Flax's array, that mistake
becomes the hint. Requires torch, not a recording.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ... import judge
from ...report import Row
from ...sides.match import Layout, layouts
from ...sides.original import FaultTrials, Trial, inside
from ...sides.run import Run
from ..places import Local, Span

MAX_LAYOUTS = 6  # number of layouts in which torch's result is compared with Flax's


@dataclass(frozen=True)
class Target:
    """A place that differs, and which of torch's operations may be the cause.

    Attributes:
      got: Flax's value.
      value: gets the value from a run of torch, or None.
      path: the submodule that computes it; "" for the whole module.
      end: number of the last operation before it.
      unaffected: submodules with correct outputs.
    """

    got: np.ndarray
    value: Callable[[Run], np.ndarray | None]
    path: str
    end: int
    unaffected: frozenset[str]

    def wants(self, number: int, path: str) -> bool:
        """Whether an operation may be the cause, given its number and its submodule."""
        if number > self.end or not inside(path, self.path):
            return False
        return not any(inside(path, name) for name in self.unaffected)

    def matches(self, made: np.ndarray | None, allowed_layouts: list[Layout]) -> bool:
        """Whether Flax's value equals `made` in one of the layouts."""
        if made is None or made.size != self.got.size or made.dtype.kind not in "fc":
            return False
        return any(
            judge.same_function(self.got, x.value(made), zero=True).ok for x in allowed_layouts
        )


def fault_hint(local: Local, row: Row, span: Span | None = None) -> str:
    """The mistake that makes torch return Flax's value at a place, or ""."""
    trials = local.trials
    target = None if trials is None else _target(local, row, span, trials)
    if trials is None or target is None:
        return ""
    want = target.value(local.truth)
    if want is None:
        return ""
    allowed_layouts = list(islice(layouts("", target.got.shape, want.shape), MAX_LAYOUTS))
    with np.errstate(all="ignore"):
        for trial in _in_order(local, trials, target):
            run = trial.run()
            if run is not None and target.matches(target.value(run), allowed_layouts):
                local.fault_runs[row.name] = run
                return trial.description
    return ""


def explains_all(local: Local, row: str, plain: Run) -> bool:
    """Whether one mistake makes all of torch's outputs equal Flax's.

    Then no later place is at fault.
    """
    run = local.fault_runs.get(row)
    if run is None or not run.outputs.keys() <= plain.outputs.keys():
        return False
    pairs = [(plain.outputs[name], made) for name, made in run.outputs.items()]
    return all(_matches_everywhere(got, made) for got, made in pairs if made.dtype.kind in "fc")


def other_stop_gradient(local: Local, plain: Run) -> str:
    """The change of torch's gradient stops that reproduces Flax's gradients, or ""."""
    trials, names = local.trials, local.pair.names
    for trial in trials.other_gradients() if trials is not None and plain.gradients else ():
        run = trial.run()
        made = names.gradients(run.gradients) if run is not None else {}
        shared = made.keys() & plain.gradients.keys()
        if shared and all(
            _matches_everywhere(plain.gradients[name], made[name]) for name in shared
        ):
            return trial.description
    return ""


def _matches_everywhere(got: np.ndarray, made: np.ndarray) -> bool:
    return got.shape == made.shape and judge.same_function(got, made, zero=True).ok


def _in_order(local: Local, trials: FaultTrials, target: Target) -> Iterator[Trial]:
    plan = local.pair.plan
    skipped = [name for name in (plan.skipped if plan else ()) if name in trials.built]
    yield from trials.without([name for name in skipped if trials.built[name].dtype.kind == "f"])
    yield from trials.among(target.wants)


def _target(local: Local, row: Row, span: Span | None, trials: FaultTrials) -> Target | None:
    name = local.torch_names.get(row.name if span is None else span.step)
    if span is not None and name is not None:
        path = _submodule(local, name)
        arrives = _argument(name, span.argument)
        return Target(span.got, arrives, "", trials.start(path), _unaffected(local, path) | {path})
    if name is not None:
        path = _submodule(local, name)
        value: Callable[[Run], np.ndarray | None] = lambda run: run.taps.get(name)  # noqa: E731
        got = local.run.taps[row.name]
        return Target(got, value, path, trials.end(path), _unaffected(local, path))
    if row.name in local.truth.outputs:
        got, last = local.run.outputs[row.name], trials.count
        value = lambda run: run.outputs.get(row.name)  # noqa: E731
        return Target(got, value, "", last, _unaffected(local, ""))
    return None


def _argument(step: str, argument: str) -> Callable[[Run], np.ndarray | None]:
    """Gets an argument of a submodule from a run of torch."""

    def value(run: Run) -> np.ndarray | None:
        call = run.calls.get(step)
        return None if call is None else call.inputs.get(argument)

    return value


def _submodule(local: Local, tap: str) -> str:
    """The torch submodule whose output, or inner point, a tap is."""
    path, known = tap.partition("#")[0], {*local.pair.original.parts}
    while path and path not in known:
        cut = max(path.rfind("."), path.rfind("["))
        path = path[:cut] if cut > 0 else ""
    return path


def _unaffected(local: Local, place: str) -> frozenset[str]:
    """Submodules with only correct outputs, except those that contain the place itself."""
    wrong = {_submodule(local, local.torch_names.get(x.name, "")) for x in local.wrong()}
    right = {_submodule(local, name) for name in local.torch_names.values()} - wrong
    return frozenset(path for path in right if path and not inside(place, path))
