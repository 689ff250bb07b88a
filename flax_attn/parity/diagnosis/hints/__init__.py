"""Hints: what two arrays, or the state after a call, say of a mistake without torch's program.

A hint follows from the numbers. What only makes a fault likely, such as the size of an error, is a
note.
"""

import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from ... import judge
from ...search.masks import LOW
from ...sides.match import point_of
from ...sides.pair import Names, matches
from ...sides.run import Run
from .conjugate import conjugate, is_complex
from .numbers import in_float32, other_rounding, times, zeros
from .state_changes import changed_alone

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


def likely(got: np.ndarray, want: np.ndarray) -> str:
    """What makes a cause likely without giving Flax's value; or ""."""
    if is_complex(got, want) or got.shape != want.shape:
        return ""
    for step in (zeros, other_rounding, in_float32):
        with np.errstate(all="ignore"):
            if text := attempt(step.__name__, lambda step=step: step(got, want), ""):
                return text
    return ""


def backward_hint(got: np.ndarray, want: np.ndarray) -> str:
    """The likely cause of a wrong gradient, or ""."""
    return attempt("of a gradient", lambda: _backward_hint(got, want), "")


def result_hint(run: Run, truth: Run, names: Names) -> str:
    """The likely cause of an output that differs although no tap does, or ""."""
    return attempt("of empty rows", lambda: _fully_masked_rows(run, truth, names), "")


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
        return f"a gradient times {times(factor)}"
    in_float32 = want.astype(np.float32).astype(np.float64)
    if judge.error(got, want) <= judge.error(in_float32, want) * 4:
        return "a gradient in float32"
    differs = np.abs(got - want) > judge.SAME_FUNCTION * np.abs(want).max()
    if differs.any() and not got[differs].any():
        return "a gradient that is stopped in part"
    return ""


def fully_masked(scores: np.ndarray) -> np.ndarray:
    """Boolean array marking fully masked rows, with a trailing axis of size one."""
    return scores.max(-1, keepdims=True) < LOW


def _fully_masked_rows(run: Run, truth: Run, names: Names) -> str:
    """Hint that weights differ only in fully masked rows, if no local error shows it, or ""."""
    for name, flax_name, match in matches(run, truth, names):
        scores = truth.taps.get(name.replace("weights", "scores"))
        got, want = run.taps[flax_name], match.value
        if point_of(name) != "weights" or scores is None or scores.shape != want.shape:
            continue
        rows = np.broadcast_to(fully_masked(scores), want.shape)
        if not judge.same_function(got[~rows], want[~rows], zero=True).ok:
            continue
        one, two = want[rows].any(), got[rows].any()
        if one and not two:
            return "rows that see nothing: torch averages, Flax gives zeros"
        if two and not one:
            return "rows that see nothing: torch gives zeros, Flax averages"
    return ""
