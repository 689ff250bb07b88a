"""The cause of a value or gradient: the change of torch's program that gives Flax's.

Needs torch, not a recording of it.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from ...weights.plan import Plan
from .. import judge
from ..report import Row
from ..search.engine import explained
from ..search.gradients import explained_gradients, gradients
from ..search.operation import sources
from ..search.replay import Replay, in_float64
from ..search.span import Cause, Outcome
from ..search.target import Target
from ..sides.match import hidden
from ..sides.run import Run
from ..sides.tape import Tape
from .places import FaultSpan, Local


def cause_of(
    local: Local, row: Row, span: FaultSpan | None = None, got: np.ndarray | None = None
) -> Outcome | None:
    """What the search for a wrong value gave; None where there is nothing to search in.

    `got` stands for Flax's value at the row, as of a layer that was called by itself.
    """
    tape = local.tape
    place = None if tape is None else _marked(local, row, span)
    if tape is None or place is None or place[0] not in tape.marks:
        return None
    mark, flax, want = place
    flax, number = flax if got is None else got, tape.marks[mark]
    if flax.dtype.kind not in "fc":
        return None
    point = "" if span is not None else local.truth.point(local.torch_names.get(row.name, ""))
    if point == "scores":
        flax, want = hidden(flax), hidden(want)
    bounds = frozenset(_agreeing(local, tape, number)) - {number}
    named = labels(tape, local.pair.plan)
    return explained(tape, Target(number, flax, want, point), bounds, named, local.budget)


def cause_of_state(local: Local, path: str) -> Outcome | None:
    """What the search for other state after the call gave; None where nothing is to search in."""
    tape, names, states = local.tape, local.pair.names, local.truth.state
    if tape is None or path not in local.run.state:
        return None
    for name, want in states.items():
        number = tape.marks.get(f"state {name}")
        if number is not None and path in (names.tap(name), *names.carried({name: want})):
            target = Target(number, local.run.state[path], want, "")
            bounds = frozenset(_agreeing(local, tape, number)) - {number}
            return explained(tape, target, bounds, labels(tape, local.pair.plan), local.budget)
    return None


def _marked(
    local: Local, row: Row, span: FaultSpan | None
) -> tuple[str, np.ndarray, np.ndarray] | None:
    """The name of a value on the tape, Flax's array and torch's."""
    name = local.torch_names.get(row.name if span is None else span.step)
    if span is not None and name is not None:
        want = local.truth.calls[name].inputs.get(span.argument)
        return None if want is None else (f"argument {span.argument} {name}", span.got, want)
    if name is not None:
        return f"tap {name}", local.run.taps[row.name], local.truth.taps[name]
    if row.name in local.truth.outputs:
        return f"output {row.name}", local.run.outputs[row.name], local.truth.outputs[row.name]
    return None


def _agreeing(local: Local, tape: Tape, number: int) -> Iterator[int]:
    """The values that Flax was given: those of all taps that were replaced by torch's.

    And what they are only laid out from, unless that is the value with this number, or before it.
    """
    marks = (f"tap {local.torch_names[name]}" for name in local.force if name in local.torch_names)
    for mark in (mark for mark in marks if mark in tape.marks):
        for value in sources(tape, tape.marks[mark]):
            if value == number:
                break
            yield value


def labels(tape: Tape, plan: Plan | None) -> Mapping[int, str]:
    """Names of values: of parameters and inputs, then of taps."""
    skipped = plan.skipped if plan else ()
    names = {
        number: f"{name} (a rule skips it)" if name in skipped else name
        for number, name in tape.names.items()
    }
    taps = {k.removeprefix("tap "): v for k, v in tape.marks.items() if k.startswith("tap ")}
    return {**{v: k for k, v in reversed(taps.items())}, **names}


def explains_all(local: Local, cause: Cause | None, plain: Run) -> bool:
    """Whether one cause makes all of torch's outputs equal Flax's.

    Then no later place is at fault.
    """
    tape = local.tape
    if cause is None or tape is None:
        return False
    with in_float64():
        replay = Replay(tape, cause.changes)
        for name, got in plain.outputs.items():
            number = tape.marks.get(f"output {name}")
            if number is None:
                continue
            made = replay.value(number).detach().resolve_conj().numpy()
            if made.dtype.kind in "fc" and not _same(got, made):
                return False
    return True


def _same(got: np.ndarray, made: np.ndarray) -> bool:
    return got.shape == made.shape and judge.same_function(got, made, zero=True).ok


def cause_of_gradients(local: Local, plain: Run) -> Outcome | None:
    """What the search for other gradient stops gave; None where there is nothing to search."""
    tape, names, request = local.tape, local.pair.names, local.pair.request
    if tape is None or not plain.gradients:
        return None

    def pairs(made: dict[str, np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        carried = names.gradients(made)
        shared = [k for k in plain.gradients if k in carried]
        return [(plain.gradients[k], carried[k]) for k in shared]

    def gap(made: dict[str, np.ndarray]) -> np.ndarray:
        gaps = [(got - x) / (np.abs(got).max(initial=0) or 1.0) for got, x in pairs(made)]
        return np.concatenate([np.ravel(x).view(np.float64) for x in gaps] or [np.zeros(0)])

    def agrees(made: dict[str, np.ndarray]) -> bool:
        return all(_same(got, x) for got, x in pairs(made))

    if not _has_gradients(tape, local):
        return None
    label = labels(tape, local.pair.plan)
    return explained_gradients(tape, label, request.cotangent, gap, agrees, local.budget)


def _has_gradients(tape: Tape, local: Local) -> bool:
    """Whether a tape differentiates to torch's gradients: not if JAX evaluated a part of it."""
    with in_float64():
        made = gradients(tape, {}, local.pair.request.cotangent)
    return all(_same(x, made[k]) for k, x in local.truth.gradients.items() if k in made)
