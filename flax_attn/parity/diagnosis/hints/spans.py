"""Faults between two taps: another activation, gate or value.

First identifies torch's own function, as the one that gives its value from the preceding taps;
guesses are other functions of the same kind.
"""

from collections.abc import Iterator, Mapping
from itertools import permutations

import numpy as np

from ... import judge
from .activations import ACTIVATIONS, Activation
from .evidence import Evidence, Guesses

NOTHING = "no activation"
CANDIDATES: dict[str, Activation] = {**ACTIVATIONS, NOTHING: lambda x: x}
# Larger arrays than SOME are first compared by that many elements; above LARGE they are skipped.
SOME, LARGE = 512, 1 << 20


def between(evidence: Evidence) -> Guesses:
    """Guesses for a step's input, with another activation, gate or value before it."""
    if evidence.plain.size < 2 or evidence.plain.size > LARGE:
        return
    yield from _other_activation(evidence)
    yield from _other_gate(evidence)
    yield from _other_value(evidence)


def _equal(made: np.ndarray, want: np.ndarray) -> bool:
    """Whether two arrays are equal; compares a few elements first."""
    if not judge.same_function(made.ravel()[:SOME], want.ravel()[:SOME], zero=True).ok:
        return False
    return judge.same_function(made, want).ok


def _other_activation(evidence: Evidence) -> Guesses:
    """Another activation of one tap."""
    plain = evidence.plain
    for name, x in evidence.before.items():
        if x.size != plain.size:
            continue
        x = x.reshape(plain.shape)
        with np.errstate(all="ignore"):
            torch_activation = next((a for a, f in ACTIVATIONS.items() if _equal(f(x), plain)), "")
            torch_activation = torch_activation or (NOTHING if _equal(x, plain) else "")
            for act, function in CANDIDATES.items():
                if torch_activation and act != torch_activation:
                    yield f"{act} of {name}, where torch has {torch_activation}", function(x)
        if torch_activation:
            return


def _of_same_size(values: Mapping[str, np.ndarray], plain: np.ndarray) -> dict[str, np.ndarray]:
    return {name: x.reshape(plain.shape) for name, x in values.items() if x.size == plain.size}


def _other_value(evidence: Evidence) -> Guesses:
    """Another preceding value instead of the one torch uses."""
    plain, candidates = evidence.plain, dict(evidence.before)
    for name, call in evidence.truth.calls.items():
        if name in evidence.before and "0" in call.inputs:
            candidates.setdefault(f"what {name} is given", call.inputs["0"])
    same_size = _of_same_size(candidates, plain)
    torch_activation = next((name for name, x in same_size.items() if _equal(x, plain)), "")
    for name, x in same_size.items() if torch_activation else ():
        if name != torch_activation and not _equal(x, plain):
            yield f"{name}, where torch takes {torch_activation}", x


def _gate_parts(evidence: Evidence) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Candidate pairs of gate and gated value: two taps, or two halves of one."""
    plain = evidence.plain
    same_size = _of_same_size(evidence.before, plain)
    for one, two in permutations(same_size, 2):
        yield f"{one} as the gate of {two}", same_size[one], same_size[two]
    for name, x in evidence.before.items():
        if x.size == 2 * plain.size and x.shape[-1] == 2 * plain.shape[-1]:
            first, second = np.split(x, 2, axis=-1)
            cuts = {"the first half": (first, second), "the second half": (second, first)}
            cuts["every other number, from the first,"] = (x[..., ::2], x[..., 1::2])
            cuts["every other number, from the second,"] = (x[..., 1::2], x[..., ::2])
            for what, (gate, up) in cuts.items():
                shape = plain.shape
                yield f"{what} of {name} as the gate", gate.reshape(shape), up.reshape(shape)


def _other_gate(evidence: Evidence) -> Guesses:
    """A gate with another activation, or with its two operands exchanged."""
    parts = list(_gate_parts(evidence))
    with np.errstate(all="ignore"):
        for what, gate, up in parts:
            for act, function in ACTIVATIONS.items():
                if not _equal(function(gate) * up, evidence.plain):
                    continue
                torch_activation = f"{act} of {what}"
                for other, activation in CANDIDATES.items():
                    if other != act:
                        yield f"{other} of {what}, where torch has {act}", activation(gate) * up
                for hint, one, two in parts:
                    if hint != what:
                        yield f"{hint}, where torch takes {torch_activation}", function(one) * two
                return
