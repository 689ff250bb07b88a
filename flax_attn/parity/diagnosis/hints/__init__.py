"""Hints: after a failure known faults are tried on the culprit, and the one that fits is named.

Each guess is what Flax would have computed from torch's own values with one fault in it. A guess
that gives Flax's value, wherever that differs from torch's, says what the fault looks like.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ... import judge
from ...report import Row
from ...sides.match import Layout, hidden, paired, point_of
from ...sides.pair import Names
from ...sides.run import Call, Run
from .again import earlier, together
from .anything import anything, narrow, zeros
from .attention import context, heads_together, scores, weights
from .conditioning import conditioning
from .evidence import Evidence, Guess
from .fused import recut, recut_together
from .likeness import partly, throughout, where_it_differs
from .modules import submodule
from .rotary import fitted_base, turned, turned_together

POINTS = {"scores": scores, "weights": weights, "context": context, "input": recut}
POINTS |= dict.fromkeys(("query", "key", "value"), turned)


def hint(row: Row, run: Run, truth: Run, names: Names) -> str:
    """What the value of a failed local row looks like, or ""."""
    evidence = _evidence(row.name, run, truth, names)
    if evidence is None:
        return ""
    with np.errstate(all="ignore"):
        said = explained(evidence)
        if not said and evidence.point == "scores":
            said = explained(_centred(evidence))
        return said or conditioning(evidence) or narrow(evidence)


def explained(evidence: Evidence) -> str:
    """What the first guess says that explains the whole difference, or ""."""
    for explains in (throughout, where_it_differs):
        for guess in _guesses(evidence):
            if explains(evidence, guess):
                return _told(guess[0], 1.0)
        if nothing := zeros(evidence):
            return nothing
    for guess in _guesses(evidence):
        share = partly(evidence, guess)
        if share is not None:
            return _told(guess[0], share)
    return ""


def _centred(evidence: Evidence) -> Evidence:
    """Scores less the mean of their rows: a constant added to a row changes no weight."""

    def centre(x: np.ndarray) -> np.ndarray:
        seen = np.isfinite(x)
        count = np.maximum(seen.sum(-1, keepdims=True), 1)
        return x - np.where(seen, x, 0.0).sum(-1, keepdims=True) / count

    layout = Layout.plain(lambda x: centre(evidence.layout.value(x)))
    got, want = centre(evidence.got), centre(evidence.want)
    return replace(evidence, got=got, want=want, layout=layout)


def _told(what: str | Callable[[float], str], share: float) -> str:
    if callable(what):
        return what(share)
    return what if round(share, 6) == 1 else f"{what}, {share:.2g} of it"


def backward_hint(got: np.ndarray, want: np.ndarray) -> str:
    """What a gradient that arrives looks like, or ""."""
    if not got.any():
        return "a gradient that is stopped"
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
    if tap.startswith("between "):
        return _given(tap.rpartition(" and ")[2], run, truth, names)
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
        heard = _heard(run, truth, names)
        return Evidence(name, got, match.value, want, match.layout, call, truth, heard)
    return None


def _given(tap: str, run: Run, truth: Run, names: Names) -> Evidence | None:
    """What a submodule was given, if Flax's inputs were recorded."""
    for name, call in truth.calls.items():
        given = getattr(run, "inputs", {}).get(names.tap(name))
        want = call.inputs.get("0")
        if tap not in (name, names.tap(name)) or not given or want is None:
            continue
        match = paired("input", given[0], want)
        if match is None:
            return None
        owner, _, last = name.rpartition(".")
        count = last.partition("#")[2]
        here = (f"{owner}." if owner else "") + "input" + (f"#{count}" if count else "")
        heard = _heard(run, truth, names)
        inside = Call("input")
        return Evidence(here, given[0], match.value, want, match.layout, inside, truth, heard)
    return None


def _heard(run: Run, truth: Run, names: Names) -> frozenset[str]:
    return frozenset(name for name in truth.taps if names.tap(name) in run.taps)


def _guesses(evidence: Evidence) -> Iterator[Guess]:
    yield from POINTS.get(evidence.point, submodule)(evidence)
    yield from anything(evidence)
    yield from earlier(evidence, POINTS)
    for changes in (turned_together, recut_together, heads_together):
        yield from together(evidence, changes)
    yield from fitted_base(evidence)
