"""Gradients that are stopped or scaled elsewhere than in torch, while all values agree."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from itertools import combinations, product
from typing import Any

import numpy as np

from ..sides.tape import INPUT, OUTPUT, PARAMETER, Node, Ref, Tape, flat
from ..torch_module import to_numpy, to_torch
from .fit import short_numbers
from .inside import attempted, inside
from .operation import VIEWS, Changed, Operation, computed, number_text
from .replay import Change, Changes, Replay, ancestors, in_one_thread
from .sites import subsets
from .span import Budget, Cause, Outcome

Gradients = dict[str, np.ndarray]
STOPPED, UNLIKE = "a gradient that is stopped ", "as by a stop_gradient that torch does not have"
SKETCH = 256  # numbers by which gradients are compared before they are compared whole
CLOSE = 1e-8  # relative difference of such sketches
MANY = {2: 512, 3: 96}  # number of places of which so many are taken together


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
    gap: Callable[[Gradients], np.ndarray],
    agrees: Callable[[Gradients], bool],
    budget: Budget,
) -> Outcome:
    """Searches for other stops and factors of torch's gradients that give Flax's.

    Args:
      cotangent: the gradient of an output.
      gap: Flax's gradients less gradients by torch's names, as one vector.
      agrees: whether gradients by torch's names are Flax's.
      budget: the time that is left.
    """
    budget.start()
    outputs = [v for k, v in tape.marks.items() if k.startswith(OUTPUT)]
    nodes = ancestors(tape, outputs, frozenset())
    tried, cause = 0, None

    def of(changes: Changes) -> Gradients | None:
        nonlocal tried
        tried += 1
        try:
            return gradients(tape, changes, cotangent)
        except RuntimeError:  # no output may depend on a leaf any more
            return None

    with in_one_thread(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for candidate in _stops_and_factors(
            tape, nodes, labels, lambda x: _sketch(of(x), gap), budget
        ):
            made = None if budget.spent else of(candidate.changes)
            if made is not None and agrees(made):
                cause = candidate
                break
    late = cause is None and budget.spent
    budget.stop()
    return Outcome(cause, tried, len(nodes), budget.seconds, late)


def _sketch(made: Gradients | None, gap: Callable[[Gradients], np.ndarray]) -> np.ndarray | None:
    """What is left of Flax's gradients, as a sketch: sums of its numbers with random signs."""
    if made is None:
        return None
    left = gap(made)
    places, signs = _drawn(left.size)
    return np.bincount(places, left * signs, SKETCH)


@lru_cache(maxsize=1)
def _drawn(size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each number of a gradient, the sum that it goes into and its sign there."""
    rng = np.random.RandomState(0)
    return rng.randint(SKETCH, size=size), rng.choice([-1.0, 1.0], size)


def _stops_and_factors(
    tape: Tape,
    nodes: Sequence[Node],
    labels: Mapping[int, str],
    left: Callable[[Changes], np.ndarray | None],
    budget: Budget,
) -> Iterator[Cause]:
    """Stops and factors that leave nothing of the gap, one or several at once.

    Gradients are sums over the ways through a program. So what a stop takes from them says what a
    factor there gives, and what two stops give that lie on different ways.
    """
    plain = left({})
    if plain is None or not plain.any():
        return
    size = float(np.linalg.norm(plain))
    stops: list[tuple[Cause, np.ndarray]] = []
    attached, detached = [*_attached(nodes)], [*_detached(tape, nodes, labels)]
    for stop in (*attached, *detached):
        if budget.spent:
            return
        rest = left(stop.changes)
        if rest is None:
            continue
        taken = plain - rest
        if np.linalg.norm(rest) < CLOSE * size:
            yield stop
        weight = float(taken @ plain) / float(taken @ taken or 1.0)
        if abs(weight - 1) > CLOSE and np.linalg.norm(plain - weight * taken) < CLOSE * size:
            yield _scaled(stop, 1 - weight)
        if not any(np.allclose(taken, other, CLOSE, CLOSE * size) for _, other in stops):
            stops.append((stop, taken))
    yield from _straight(tape, nodes, labels)
    for count in (2, 3):
        yield from _together(stops, plain, count)
    for one, other in product(attached, detached):  # on one way, where they do not add up
        yield _both(one, other)


def _together(
    stops: Sequence[tuple[Cause, np.ndarray]], plain: np.ndarray, count: int
) -> Iterator[Cause]:
    """Several stops that together take what Flax lacks."""
    useful = [pair for pair in stops if pair[1].any()][: MANY[count]]
    taken = np.array([row for _, row in useful])
    for some in combinations(range(len(useful)), count - 1) if len(useful) >= count else ():
        rest = np.abs(plain - taken[[*some]].sum(0) - taken).max(1)
        for last in np.flatnonzero(rest < CLOSE * np.abs(plain).max()):
            if last > some[-1]:
                yield reduce(_both, (useful[i][0] for i in (*some, last)))


def _both(one: Cause, other: Cause) -> Cause:
    return Cause(f"{one.sentence}; and {other.sentence}", {**other.changes, **one.changes})


def _scaled(stop: Cause, factor: float) -> Cause:
    """A factor of the gradient where a stop would be: a share of the stop."""
    exact = next((x for x in short_numbers(factor) if abs(x - factor) < CLOSE), factor)
    changes = {n: replace(change, share=1 - exact) for n, change in stop.changes.items()}
    where = stop.sentence.removeprefix(STOPPED).replace(f", {UNLIKE}", "")
    return Cause(f"a gradient times {number_text(exact)} {where}", changes)


def _straight(tape: Tape, nodes: Sequence[Node], labels: Mapping[int, str]) -> Iterator[Cause]:
    """An operation whose gradient is that of its operand, as of a straight-through estimator."""

    def past(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] + (func(*args, **kwargs) - args[0]).detach()

    for what, group in subsets(nodes, labels):
        op = Operation(group[0], tape, labels)
        inexact = 0 in op.tensors and _is_inexact(op.args[0]) and op.name not in VIEWS
        if inexact and not op.node.several and op.args[0].shape == op.out.shape:
            text = f"a gradient that passes {op} as if it were not there, straight through{what}"
            yield Cause(text, {node.number: computed(past) for node in group})


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
    return f"{STOPPED}{where}, {UNLIKE}"
