"""Gradients that are stopped elsewhere than in torch, while all values agree."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..sides.tape import INPUT, OUTPUT, PARAMETER, Node, Ref, Tape, flat
from ..torch_module import to_numpy, to_torch
from .inside import attempted, inside
from .operation import Changed, Operation, computed
from .replay import Change, Changes, Replay, in_float64, span
from .sites import subsets
from .span import Budget, Cause, Outcome

Gradients = dict[str, np.ndarray]


def gradients(
    tape: Tape, changes: Changes, cotangent: Callable[[str, Any], np.ndarray]
) -> Gradients:
    """The gradients of parameters and inputs with some changes, by torch's names."""
    import torch

    named = {k: v for k, v in tape.marks.items() if k.startswith((PARAMETER, INPUT))}
    floats = {k: v for k, v in named.items() if _is_inexact(tape.values[v])}
    leaves = {v: tape.values[v].clone().requires_grad_() for v in floats.values()}
    replay = Replay(tape, changes, leaves, whole=True)
    made = {k: replay.value(v) for k, v in tape.marks.items() if k.startswith(OUTPUT)}
    outs = {k: y for k, y in made.items() if y.requires_grad}
    behind = [to_torch(cotangent(k.removeprefix(OUTPUT), y)).to(y.dtype) for k, y in outs.items()]
    results = torch.autograd.grad(
        list(outs.values()), list(leaves.values()), behind, allow_unused=True
    )
    by_value = dict(zip(leaves, results, strict=True))
    arrays = {}
    for name, number in floats.items():
        gradient = by_value[number]
        zero = torch.zeros_like(tape.values[number])
        arrays[name.removeprefix(PARAMETER)] = to_numpy(zero if gradient is None else gradient)
    return arrays


def _is_inexact(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


def explained_gradients(
    tape: Tape,
    labels: Mapping[int, str],
    cotangent: Callable[[str, Any], np.ndarray],
    agrees: Callable[[Gradients], bool],
    budget: Budget,
) -> Outcome:
    """Searches for the change of torch's stopped gradients that gives Flax's.

    Args:
      cotangent: the gradient of an output.
      agrees: whether gradients by torch's names are Flax's.
      budget: the time that is left.
    """
    budget.start()
    outputs = [v for k, v in tape.marks.items() if k.startswith(OUTPUT)]
    nodes = span(tape, outputs, frozenset())
    tried, late, cause = 0, False, None
    with in_float64(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for candidate in _other_stops(tape, nodes, labels):
            tried, late = tried + 1, budget.spent
            if late:
                break
            try:
                made = gradients(tape, candidate.changes, cotangent)
            except RuntimeError:  # no output may depend on a leaf any more
                continue
            if agrees(made):
                cause = candidate
                break
    budget.stop()
    return Outcome(cause, tried, len(nodes), budget.seconds, late)


def _other_stops(tape: Tape, nodes: Sequence[Node], labels: Mapping[int, str]) -> Iterator[Cause]:
    attached = [*_attached(nodes)]
    detached = [*_detached(tape, nodes, labels)]
    yield from attached
    yield from detached
    for one in attached:
        for other in detached:
            both = {**other.changes, **one.changes}
            yield Cause(f"{one.sentence}; and {other.sentence}", both)


def _attached(nodes: Sequence[Node]) -> Iterator[Cause]:
    """Torch's `detach` left out: everywhere, then one by one."""
    stops = [node.number for node in nodes if node.name == "detach" and node.site is not None]
    for group in [stops] if len(stops) < 2 else [stops, *([i] for i in stops)]:
        if group:
            text = "a gradient that goes on where torch stops it: a detach left out, as of a "
            text += "straight-through estimator"
            text += f", number {stops.index(group[0]) + 1} of {len(stops)}" * (
                len(group) < len(stops)
            )
            yield Cause(text, {i: Change(attached=True) for i in group})


def _detached(tape: Tape, nodes: Sequence[Node], labels: Mapping[int, str]) -> Iterator[Cause]:
    """A gradient stopped behind an operation, or at one of its operands; then inside it."""
    for row in (_stops, partial(inside, (_stops,))):
        for what, group in subsets(nodes, labels):
            for sentence, change in attempted(row, Operation(group[0], tape, labels)):
                yield Cause(f"{sentence}{what}", {node.number: change for node in group})


def _stops(op: Operation) -> Changed:
    """All places at an operation where a gradient can stop."""
    node = op.node
    if node.name == "detach":
        return
    parts = [i for i, x in enumerate(op.outs) if _is_inexact(x)] if node.several else []
    if parts != [0] and len(parts) > 1:
        for i in parts:
            text = f"behind part {i} of {op.label(0)}"
            yield _stopped(text), computed(lambda f, a, k, i=i: _without_one(f(*a, **k), i))
    elif _is_inexact(op.out):
        yield _stopped(f"behind {op}"), Change(detached=frozenset([-1]))
    refs = [x for x in flat(node.args) if isinstance(x, Ref)]
    if node.name in ("convolution", "addmm") and len(refs) == 3:
        both = frozenset([0, 1] if node.name == "convolution" else [1, 2])
        yield _stopped(f"behind {op}, before its bias"), Change(detached=both)
    for place, x in enumerate(node.args) if len(refs) > 1 else ():
        if isinstance(x, Ref) and _is_inexact(op.args[place]):
            yield _stopped(f"at {op.label(place)} in {op}"), Change(detached=frozenset([place]))


def _without_one(parts: Sequence[Any], i: int) -> list[Any]:
    return [x.detach() if n == i else x for n, x in enumerate(parts)]


def _stopped(where: str) -> str:
    return f"a gradient that is stopped {where}, as by a stop_gradient that torch does not have"
