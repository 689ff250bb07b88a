"""Faults of softcaps: present on one side only, or with another cap."""

from collections.abc import Sequence

import numpy as np

from ...sides.run import Step
from .chain import is_mask, replay
from .evidence import Evidence, Guesses
from .fitting import parallel

# Initial grid of the cap's decimal logarithm.
GRID = np.linspace(-1, 4, 51)


def other_caps(evidence: Evidence, raw: np.ndarray, steps: Sequence[Step]) -> Guesses:
    """Guesses: a fitted cap between any two of torch's steps, or instead of torch's cap."""
    shape = evidence.plain.shape
    kinds = [step.name for step in steps]
    layout_value = evidence.layout.value
    torch_cap = ""
    places = [(steps[:i], steps[i:]) for i in range(len(steps) + 1) if _open(steps[:i])]
    if "tanh" in kinds:
        at = kinds.index("tanh")
        places = [(steps[: max(at - 1, 0)], steps[at + 2 :])]
        torch_cap = f", torch's {_cap(steps[max(at - 1, 0)]):.6g}"
    for before, after in reversed(places):
        inside = replay(before, raw)

        def made(at: float, inside=inside, after=after) -> np.ndarray:
            cap = 10**at
            return replay(after, cap * np.tanh(inside / cap)).reshape(shape)

        exponent = parallel(
            lambda at, made=made: layout_value(made(at)), evidence.want, evidence.got, GRID
        )
        for cap in () if exponent is None else (float(f"{10**exponent:.6g}"), 10**exponent):
            what = f"another softcap: {cap:.6g}{torch_cap}"
            what = what if torch_cap else f"a softcap of {cap:.6g} that torch does not have"
            yield what, made(float(np.log10(cap)))


def _open(steps: Sequence[Step]) -> bool:
    """Whether no step masks, since a cap after the mask is another fault."""
    return not any(map(is_mask, steps))


def _cap(step: Step) -> float:
    """The cap of a step that divides or multiplies by it."""
    number = next((x for i, x in enumerate(step.others) if i != step.place), 1.0)
    number = float(np.asarray(number).flat[0])
    return 1 / number if step.name == "mul" else number
