"""Hints: tries known faults on the value that differs, and names the one that explains it.

Each guess is what Flax would have computed from torch's own values with one fault. If it equals
Flax's value, at least wherever that differs from torch's, its description becomes the hint. What
only makes a fault likely, such as the size of an error, is a note.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from ... import judge
from ...report import Row
from ...sides.match import Layout, hidden, match_value, point_of, sibling
from ...sides.pair import Names
from ...sides.run import Call, Run
from .attention import context, heads_together, scores, weights
from .conditioning import conditioning
from .conjugate import conjugate, is_complex
from .evidence import Evidence, Guess, Guesses, times
from .explains import partly, throughout, where_it_differs
from .fills import other_fills, without_fills
from .fused import recut, recut_together
from .generic import NOTHING, anything, narrow, zeros
from .masks import fully_masked_rows_note
from .modules import submodule
from .recompute import earlier, together
from .rotary import fitted_base, rotated_heads, rotated_together
from .rounding import other_rounding
from .spans import between
from .state_changes import changed_alone

POINTS = {"scores": scores, "weights": weights, "context": context, "input": recut}
POINTS |= dict.fromkeys(("query", "key", "value"), rotated_heads)
# Maximum number of preceding torch taps to consider.
BEFORE = 8
SCALED = "a gradient times"  # begins the hint of a gradient with a factor
Found = TypeVar("Found")


def attempt(hint: str, step: Callable[[], Found], default: Found) -> Found:
    """Returns the result of a search step, or `default` with a warning if it raises.

    Guesses assume certain shapes and types, which foreign modules may violate; a failing hint must
    not affect the verdict.
    """
    try:
        return step()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"The hint {hint!r} failed by {reason}.", RuntimeWarning, stacklevel=2)
        return default


def hint(row: Row, run: Run, truth: Run, names: Names) -> str:
    """The cause of a failed local row, which gives Flax's whole value; or ""."""
    return attempt("of a tap", lambda: _of_tap(row.name, run, truth, names, _whole), "")


def hint_in_part(row: Row, run: Run, truth: Run, names: Names) -> str:
    """A cause that gives Flax's value where it differs, or a share of which gives it; or ""."""
    return attempt("of a tap", lambda: _of_tap(row.name, run, truth, names, _in_part), "")


def likely(row: Row, run: Run, truth: Run, names: Names) -> str:
    """What makes a cause likely without giving Flax's value; or ""."""
    return attempt("of a tap", lambda: _of_tap(row.name, run, truth, names, _likely), "")


def _of_tap(tap: str, run: Run, truth: Run, names: Names, step: Callable[[Evidence], str]) -> str:
    evidence = _evidence(tap, run, truth, names)
    with np.errstate(all="ignore"):
        return "" if evidence is None else step(evidence)


def _whole(evidence: Evidence) -> str:
    if is_complex(evidence.got, evidence.want):
        return conjugate(evidence.got, evidence.want)
    return other_fills(evidence) or _centred_too(evidence, explained)


def _in_part(evidence: Evidence) -> str:
    if is_complex(evidence.got, evidence.want):
        return ""
    return _centred_too(evidence, explained_in_part)


def _likely(evidence: Evidence) -> str:
    if is_complex(evidence.got, evidence.want):
        return ""
    evidence = without_fills(evidence)
    for step in (zeros, other_rounding, conditioning, narrow):
        if text := attempt(step.__name__, lambda step=step: step(evidence), ""):
            return text
    return ""


def _centred_too(evidence: Evidence, step: Callable[[Evidence], str]) -> str:
    """What a step says, of scores also without what is added to a whole row."""
    evidence = without_fills(evidence)
    text = step(evidence)
    if not text and evidence.point == "scores":
        text = attempt("centred", lambda: step(_centred(evidence)), "")
    return text


def explained(evidence: Evidence) -> str:
    """Description of the first guess that explains the whole difference, or ""."""
    for guess in _guesses(evidence):
        if attempt("throughout", lambda g=guess: throughout(evidence, g), False):
            return _with_share(guess[0], 1.0)
    return NOTHING if not evidence.got.any() else ""


def explained_in_part(evidence: Evidence) -> str:
    """Description of the first guess that explains where Flax's value differs, or a share of it."""
    for guess in _guesses(evidence):
        if attempt("where_it_differs", lambda g=guess: where_it_differs(evidence, g), False):
            return _with_share(guess[0], 1.0)
    for guess in _guesses(evidence):
        share = attempt("partly", lambda g=guess: partly(evidence, g), None)
        if share is not None:
            return _with_share(guess[0], share)
    return ""


def _centred(evidence: Evidence) -> Evidence:
    """Scores minus their row means: adding a constant to a row does not change the weights."""

    def centre(x: np.ndarray) -> np.ndarray:
        finite = np.isfinite(x)
        count = np.maximum(finite.sum(-1, keepdims=True), 1)
        return x - np.where(finite, x, 0.0).sum(-1, keepdims=True) / count

    layout = Layout.plain(lambda x: centre(evidence.layout.value(x)))
    got, want = centre(evidence.got), centre(evidence.want)
    return replace(evidence, got=got, want=want, layout=layout)


def _with_share(what: str | Callable[[float], str], share: float) -> str:
    if callable(what):
        return what(share)
    return what if round(share, 6) == 1 else f"{what}, {share:.2g} of it"


def backward_hint(got: np.ndarray, want: np.ndarray) -> str:
    """The likely cause of a wrong gradient, or ""."""
    return attempt("of a gradient", lambda: _backward_hint(got, want), "")


def result_hint(run: Run, truth: Run, names: Names) -> str:
    """The likely cause of an output that differs although no tap does, or ""."""
    return attempt("fully_masked_rows_note", lambda: fully_masked_rows_note(run, truth, names), "")


def state_hint(path: str, run: Run, truth: Run, names: Names) -> str:
    """The likely cause of a difference in module state after the call, or ""."""
    return attempt("changed_alone", lambda: changed_alone(path, run, truth, names), "")


def _backward_hint(got: np.ndarray, want: np.ndarray) -> str:
    if not got.any():
        return "a gradient that is stopped"
    if is_complex(got, want):
        return conjugate(got, want)
    norm = float(np.vdot(want, want))
    factor = float(np.vdot(want, got)) / norm if norm else 0.0
    if factor and judge.error(got, factor * want) <= judge.SAME_FUNCTION:
        return f"{SCALED} {times(factor)}"
    in_float32 = want.astype(np.float32).astype(np.float64)
    if judge.error(got, want) <= judge.error(in_float32, want) * 4:
        return "a gradient in float32"
    differs = np.abs(got - want) > judge.SAME_FUNCTION * np.abs(want).max()
    if differs.any() and not got[differs].any():
        return "a gradient that is stopped in part"
    return ""


def _evidence(tap: str, run: Run, truth: Run, names: Names) -> Evidence | None:
    if tap.startswith("between "):
        return _input_evidence(tap.rpartition(" and ")[2], run, truth, names)
    for name, want in {**truth.taps, **truth.outputs}.items():
        got = run.taps.get(tap, run.outputs.get(tap))
        if names.tap(name) != tap or got is None:
            continue
        match = match_value(tap, got, want)
        if match is None:
            return None
        if point_of(tap) == "scores":
            got, want = hidden(got), hidden(want)
        call = truth.calls.get(name, Call("output"))
        more = (
            _tapped_points(run, truth, names),
            _before(name, want, truth),
            _keep_rates(run, truth),
        )
        return Evidence(name, got, match.value, want, match.layout, call, truth, *more)
    return None


def _input_evidence(tap: str, run: Run, truth: Run, names: Names) -> Evidence | None:
    """Evidence on the input of a submodule, if Flax's inputs were recorded."""
    for name, call in truth.calls.items():
        inputs = getattr(run, "inputs", {}).get(names.tap(name))
        want = call.inputs.get("0")
        if tap not in (name, names.tap(name)) or not inputs or want is None:
            continue
        match = match_value("input", inputs[0], want)
        if match is None:
            return None
        here = sibling(name, "input")
        more = (
            _tapped_points(run, truth, names),
            _before(name, want, truth),
            _keep_rates(run, truth),
        )
        facts = (match.value, want, match.layout, Call("input"), truth, *more)
        return Evidence(here, inputs[0], *facts)
    return None


def _before(name: str, want: np.ndarray, truth: Run) -> dict[str, np.ndarray]:
    """Torch's preceding taps that a value may be computed from, the latest first."""
    order = list(truth.taps)
    order = order[: order.index(name)] if name in truth.taps else order
    taps = ((n, truth.taps[n]) for n in reversed(order) if not n.startswith(f"{name}."))
    return dict([(n, x) for n, x in taps if x.dtype.kind == "f" and x.size >= want.size][:BEFORE])


def _tapped_points(run: Run, truth: Run, names: Names) -> frozenset[str]:
    return frozenset(name for name in truth.taps if names.tap(name) in run.taps)


def _keep_rates(run: Run, truth: Run) -> tuple[tuple[float, float], ...]:
    """The keep rate of each dropout mask, in Flax and in torch."""
    return tuple(zip(run.rates, truth.rates, strict=False))


def _guesses(evidence: Evidence) -> Iterator[Guess]:
    at_point = POINTS.get(evidence.point, submodule)
    for guess in (at_point, between, anything):
        yield from _until_error(guess.__name__, lambda g=guess: g(evidence))
    yield from _until_error("earlier", lambda: earlier(evidence, POINTS))
    for changes in (rotated_together, recut_together, heads_together):
        yield from _until_error(changes.__name__, lambda c=changes: together(evidence, c))
    yield from _until_error("fitted_base", lambda: fitted_base(evidence))


def _until_error(hint: str, guesses: Callable[[], Guesses]) -> Iterator[Guess]:
    """Yields guesses until one raises."""
    made = attempt(hint, guesses, iter(()))
    while (guess := attempt(hint, lambda: next(made, None), None)) is not None:
        yield guess
