"""Draws faults that count from all blocks, kinds and blocks in turn."""

from collections.abc import Iterator, Sequence

import numpy as np

from flax_attn.parity.sides.run import Run

from .fault import Fault, Subject
from .mutations import LACKING


def drawn(
    subjects: Sequence[Subject], count: int, seed: int, lacking: float = 0.3
) -> Iterator[tuple[Fault, Run, Run]]:
    """Yields faults with the right port's run and the wrong one's.

    A share of them, `lacking`, is of kinds that the catalogue of the search lacks.
    """
    rng = np.random.RandomState(seed)
    queues = [(_in_turn(s, rng, False), _in_turn(s, rng, True), s.run(s.port)) for s in subjects]
    made, others, turn = 0, 0, 0
    while made < count and queues:
        usual, strange, right = queues[turn % len(queues)]
        wanted = strange if others < lacking * (made + 1) and strange else usual
        fault, wrong = _next(wanted, right)
        if fault is None or wrong is None:
            queues.pop(turn % len(queues))
            continue
        made, turn, others = made + 1, turn + 1, others + (fault.kind in LACKING)
        yield fault, right, wrong


def _in_turn(subject: Subject, rng: np.random.RandomState, lacking: bool) -> list[Fault]:
    """The faults of a block, one of each kind in turn, the last first."""
    by_kind: dict[str, list[Fault]] = {}
    faults = [fault for fault in subject.faults() if (fault.kind in LACKING) is lacking]
    for i in rng.permutation(len(faults)):
        by_kind.setdefault(faults[i].kind, []).append(faults[i])
    kinds = list(by_kind)
    rng.shuffle(kinds)
    turns = range(max(map(len, by_kind.values()), default=0))
    order = [by_kind[kind][i] for i in turns for kind in kinds if i < len(by_kind[kind])]
    return order[::-1]


def _next(faults: list[Fault], right: Run) -> tuple[Fault | None, Run | None]:
    """The next fault that counts, and its run; removed from the list with those that do not."""
    while faults:
        fault = faults.pop()
        wrong = fault.runs(right)
        if wrong is not None:
            return fault, wrong
    return None, None
