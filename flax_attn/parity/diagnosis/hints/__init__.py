"""Hints: after a failure known faults are tried on the culprit, and the one that fits is named.

Each guess is what Flax would have computed from torch's own values with one fault in it. A guess
that gives Flax's value, wherever that differs from torch's, says what the fault looks like.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ... import judge
from ...report import Row
from ...sides.match import hidden, paired, point_of
from ...sides.pair import Names
from ...sides.run import Call, Run
from .anything import anything, narrow, zeros
from .attention import context, scores, weights
from .conjugate import conjugate, is_complex
from .evidence import Evidence, Guess
from .likeness import partly, throughout, where_it_differs
from .modules import submodule
from .rotary import turned

POINTS = {"scores": scores, "weights": weights, "context": context}
POINTS |= dict.fromkeys(("query", "key", "value"), turned)


def hint(row: Row, run: Run, truth: Run, names: Names) -> str:
    """What the value of a failed local row looks like, or ""."""
    evidence = _evidence(row.name, run, truth, names)
    if evidence is None:
        return ""
    if is_complex(evidence.got, evidence.want):
        return conjugate(evidence.got, evidence.want)
    with np.errstate(all="ignore"):
        guesses = list(_guesses(evidence))
        for explains in (throughout, where_it_differs):
            found = next(filter(partial(explains, evidence), guesses), None)
            if found is not None:
                return _told(found[0], 1.0)
            if nothing := zeros(evidence):
                return nothing
        for guess in guesses:
            share = partly(evidence, guess)
            if share is not None:
                return _told(guess[0], share)
    return narrow(evidence)


def _told(what: str | Callable[[float], str], share: float) -> str:
    if callable(what):
        return what(share)
    return what if round(share, 6) == 1 else f"{what}, {share:.2g} of it"


def backward_hint(got: np.ndarray, want: np.ndarray) -> str:
    """What a gradient that arrives looks like, or ""."""
    if not got.any():
        return "a gradient that is stopped"
    if is_complex(got, want):
        return conjugate(got, want)
    norm = float(np.vdot(want, want))
    factor = float(np.vdot(want, got)) / norm if norm else 0.0
    if factor and judge.error(got, factor * want) <= judge.SAME_FUNCTION:
        return f"a gradient times {factor:.6g}"
    in_float32 = want.astype(np.float32).astype(np.float64)
    if judge.error(got, want) <= judge.error(in_float32, want) * 4:
        return "a gradient in float32"
    apart = np.abs(got - want) > judge.SAME_FUNCTION * np.abs(want).max()
    if apart.any() and not got[apart].any():
        return "a gradient that is stopped in part"
    return ""


def _evidence(tap: str, run: Run, truth: Run, names: Names) -> Evidence | None:
    for name, want in {**truth.taps, **truth.outputs}.items():
        got = run.taps.get(tap, run.outputs.get(tap))
        if names.tap(name) != tap or got is None:
            continue
        match = paired(tap, got, want)
        if match is None:
            return None
        if point_of(tap) == "scores":
            got, want = hidden(got), hidden(want)
        call = truth.calls.get(name, Call("output"))
        return Evidence(name, got, match.value, want, match.layout, call, truth)
    return None


def _guesses(evidence: Evidence) -> Iterator[Guess]:
    yield from POINTS.get(evidence.point, submodule)(evidence)
    yield from anything(evidence)
