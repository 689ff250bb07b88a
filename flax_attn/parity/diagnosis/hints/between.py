"""Plain functions between two taps: an activation, a gate, taken for another.

Torch's own function is found first, as the one that gives its value from the taps before it; what
Flax has in its place is another of the same kind.
"""

from collections.abc import Iterator, Mapping
from itertools import permutations

import numpy as np

from ... import judge
from .activations import ACTIVATIONS, Activation
from .evidence import Evidence, Guesses

NOTHING = "no activation"
TRIED: dict[str, Activation] = {**ACTIVATIONS, NOTHING: lambda x: x}
# Arrays that are larger are judged by this many of their elements first.
SOME, LARGE = 512, 1 << 20


def between(evidence: Evidence) -> Guesses:
    """What arrives at a step when an activation before it is another."""
    if evidence.plain.size < 2 or evidence.plain.size > LARGE:
        return
    yield from _one(evidence)
    yield from _gate_otherwise(evidence)
    yield from _another(evidence)


def _equal(made: np.ndarray, want: np.ndarray) -> bool:
    """Whether two arrays are equal, some of their elements first."""
    if not judge.same_function(made.ravel()[:SOME], want.ravel()[:SOME], zero=True).ok:
        return False
    return judge.same_function(made, want).ok


def _one(evidence: Evidence) -> Guesses:
    """An activation of one tap."""
    plain = evidence.plain
    for name, x in evidence.before.items():
        if x.size != plain.size:
            continue
        x = x.reshape(plain.shape)
        with np.errstate(all="ignore"):
            torchs = next((a for a, f in ACTIVATIONS.items() if _equal(f(x), plain)), "")
            torchs = torchs or (NOTHING if _equal(x, plain) else "")
            for act, function in TRIED.items():
                if torchs and act != torchs:
                    yield f"{act} of {name}, where torch has {torchs}", function(x)
        if torchs:
            return


def _of_its_size(values: Mapping[str, np.ndarray], plain: np.ndarray) -> dict[str, np.ndarray]:
    return {name: x.reshape(plain.shape) for name, x in values.items() if x.size == plain.size}


def _another(evidence: Evidence) -> Guesses:
    """Another value that torch had by then, in place of the one that it takes."""
    plain, had = evidence.plain, dict(evidence.before)
    for name, call in evidence.truth.calls.items():
        if name in evidence.before and "0" in call.inputs:
            had.setdefault(f"what {name} is given", call.inputs["0"])
    alike = _of_its_size(had, plain)
    torchs = next((name for name, x in alike.items() if _equal(x, plain)), "")
    for name, x in alike.items() if torchs else ():
        if name != torchs and not _equal(x, plain):
            yield f"{name}, where torch takes {torchs}", x


def _gate_parts(evidence: Evidence) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Two arrays that may be a gate and what it opens: two taps, or two halves of one."""
    plain = evidence.plain
    alike = _of_its_size(evidence.before, plain)
    for one, two in permutations(alike, 2):
        yield f"{one} as the gate of {two}", alike[one], alike[two]
    for name, x in evidence.before.items():
        if x.size == 2 * plain.size and x.shape[-1] == 2 * plain.shape[-1]:
            first, second = np.split(x, 2, axis=-1)
            cuts = {"the first half": (first, second), "the second half": (second, first)}
            cuts["every other number, from the first,"] = (x[..., ::2], x[..., 1::2])
            cuts["every other number, from the second,"] = (x[..., 1::2], x[..., ::2])
            for what, (gate, up) in cuts.items():
                shape = plain.shape
                yield f"{what} of {name} as the gate", gate.reshape(shape), up.reshape(shape)


def _gate_otherwise(evidence: Evidence) -> Guesses:
    """A gate by another activation, or with its two sides exchanged."""
    parts = list(_gate_parts(evidence))
    with np.errstate(all="ignore"):
        for what, gate, up in parts:
            for act, function in ACTIVATIONS.items():
                if not _equal(function(gate) * up, evidence.plain):
                    continue
                torchs = f"{act} of {what}"
                for other, activation in TRIED.items():
                    if other != act:
                        yield f"{other} of {what}, where torch has {act}", activation(gate) * up
                for said, one, two in parts:
                    if said != what:
                        yield f"{said}, where torch takes {torchs}", function(one) * two
                return
