"""Faults of masks: which keys are masked, the fill value, and fully masked rows."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from ... import judge
from ...sides.match import point_of
from ...sides.pair import Names, matches
from ...sides.run import Run, Step
from .chain import is_mask, product, replay, softmax, steps_of
from .evidence import Evidence, Guesses

# Scores below this count as masked, whatever fill value was chosen.
LOW = -9e3


def other_mask(evidence: Evidence, raw: np.ndarray, steps: Sequence[Step]) -> Guesses:
    """Guesses: another mask, or another fill value."""
    bare = replay([step for step in steps if not is_mask(step)], raw).reshape(evidence.plain.shape)
    visible = np.isfinite(evidence.plain)
    yield from _rows(evidence, bare)
    for what, other in (*_aligned(visible), *windows(visible), *_masks(visible)):
        yield what, np.where(other, bare, -np.inf)
    flax = evidence.got
    shown = evidence.layout.value(np.where(visible, 1.0, 0.0))
    filled = flax[(shown == 0) & np.isfinite(flax)]
    if filled.size and (filled == filled[0]).all():
        yield f"a mask that fills with {filled[0]:.6g}", np.where(visible, bare, filled[0])
    if flax.shape == evidence.plain.shape:
        other = np.isfinite(flax)
        more, less = int((other & ~visible).sum()), int((visible & ~other).sum())
        if more or less:
            what = f"another mask: {more} places shown and {less} hidden that torch does not"
            yield what, np.where(other, bare, -np.inf)


def _masks(visible: np.ndarray):
    length, keys = visible.shape[-2:]
    row, column = np.arange(length)[:, None], np.arange(keys)
    yield "the mask missing", np.ones_like(visible)
    yield "the mask inverted: True and False are exchanged", ~visible
    yield "the mask shifted by one key", visible | np.roll(visible, 1, -1) & (column > 0)
    yield "the mask shifted back by one key", visible & np.roll(visible, -1, -1)
    if length == keys:
        yield "the mask transposed: queries and keys exchanged", np.swapaxes(visible, -1, -2)
    somewhere = visible.any(-2, keepdims=True)
    yield "a mask without causality", visible | np.broadcast_to(somewhere, visible.shape)
    causal = row + (keys - length) >= column
    yield "a mask without padding", visible | np.broadcast_to(causal, visible.shape)


def _aligned(visible: np.ndarray):
    """A causal mask aligned to the wrong corner, for different numbers of queries and keys.

    The conventions align either the first query with the first key, or the last with the last.
    """
    length, keys = visible.shape[-2:]
    shift = keys - length
    first = np.arange(length)[:, None] >= np.arange(keys)
    last = np.arange(length)[:, None] + shift >= np.arange(keys)
    ends = {"the first key (top left)": first, "the last key (bottom right)": last}
    for (expected, causal), (other, wrong) in permutations(ends.items(), 2):
        unpadded = visible.any(-2, keepdims=True) | ~causal.any(0)
        if shift and visible.any() and not (visible ^ (causal & unpadded)).any():
            by = abs(shift)
            hint = f"the causal mask aligned to {other}, torch's to {expected}: shifted by {by}"
            yield hint, np.broadcast_to(wrong, visible.shape) & unpadded


def hidden_later(score: np.ndarray) -> Guesses:
    """Guesses: weights of torch's scores with a further mask applied after them."""
    visible = np.isfinite(score)
    for what, other in (*_aligned(visible), *windows(visible), *_masks(visible)):
        less = visible & other
        if less.any() and (less != visible).any():
            yield what, softmax(np.where(less, score, -np.inf))


def windows(visible: np.ndarray):
    """Window masks with one or two keys more or fewer, back, ahead or both ways."""
    length, keys = visible.shape[-2:]
    back = np.arange(keys - length, keys)[:, None] - np.arange(keys)  # T S
    shown = back[visible.reshape(-1, length, keys).any(0)]
    if not shown.size:
        return
    furthest, nearest = int(shown.max()), int(shown.min())
    unpadded = visible.any(-1, keepdims=True) & visible.any(-2, keepdims=True)
    for by in (1, -1, 2, -2):
        ways = {
            "back": (furthest + by, nearest),
            "ahead": (furthest, nearest - by),
            "both ways": (furthest + by, nearest - by),
        }
        for way, (most, least) in ways.items():
            if way != "back" and nearest >= 0:
                continue
            inside = (back <= most) & (back >= least)
            beyond = (back > furthest) | (back < nearest)
            other = inside & (visible | unpadded & beyond)
            wider = f"{abs(by)} {'wider' if by > 0 else 'narrower'} {way}"
            keys, torch_reach = (
                end - start + 1 for end, start in ((most, least), (furthest, nearest))
            )
            yield f"a window {wider}: {keys} keys, torch {torch_reach}, itself included", other


def fully_masked(scores: np.ndarray) -> np.ndarray:
    """Boolean array marking fully masked rows, with a trailing axis of size one."""
    return scores.max(-1, keepdims=True) < LOW


def _rows(evidence: Evidence, bare: np.ndarray) -> Guesses:
    """Scores of fully masked rows: all of them -inf, or none."""
    nothing = fully_masked(evidence.plain)
    if not nothing.any() or nothing.all():
        return
    what = "rows that see nothing: "
    if np.isfinite(evidence.plain[np.broadcast_to(nothing, bare.shape)]).any():
        shown = np.where(nothing, -np.inf, evidence.plain)
        yield f"{what}torch averages there, Flax hides every key", shown
    else:
        for fill in (0.0, float(np.finfo(np.float64).min), bare):
            shown = np.where(nothing, fill, evidence.plain)
            yield f"{what}torch gives zeros, Flax averages", shown


def rows_of_weights(evidence: Evidence, score: np.ndarray) -> Guesses:
    """Weights of fully masked rows: zeros, an average, or NaN."""
    plain = evidence.plain
    score = score.reshape(plain.shape)
    nothing = fully_masked(score)
    if not nothing.any():
        return
    what = "rows that see nothing: "
    zero = not plain[np.broadcast_to(nothing, plain.shape)].any()
    torch_text = "torch gives zeros" if zero else "torch averages"
    yield f"{what}{torch_text}, Flax gives NaN", np.where(nothing, np.nan, plain)
    if not zero:
        yield f"{what}torch averages, Flax gives zeros", np.where(nothing, 0.0, plain)
    even = np.full_like(plain, 1 / plain.shape[-1])
    for average in (even, softmax(_unmasked_scores(evidence, score))):
        text = "torch gives zeros, Flax averages" if zero else "torch and Flax average otherwise"
        yield f"{what}{text}", np.where(nothing, average, plain)


def _unmasked_scores(evidence: Evidence, score: np.ndarray) -> np.ndarray:
    """The scores of the same attention without its mask."""
    at = evidence.at("scores")
    query, key = at.call.inputs.get("query"), at.call.inputs.get("key")
    if query is None or key is None:
        return np.zeros_like(score)
    raw = product(query, key)
    steps = [step for step in steps_of(at, raw) if not is_mask(step)]
    return replay(steps, raw).reshape(score.shape)


def only_fully_masked(evidence: Evidence, places: np.ndarray) -> bool:
    """Whether all `places` are weights of fully masked rows."""
    score = evidence.call.inputs.get("scores")
    if evidence.point != "weights" or score is None or score.size != evidence.plain.size:
        return False
    nothing = np.broadcast_to(
        fully_masked(score.reshape(evidence.plain.shape)), evidence.plain.shape
    )
    rows = evidence.layout.value(nothing)
    return rows.shape == places.shape and bool(places.any()) and not (places & ~rows).any()


def fully_masked_rows_note(run: Run, truth: Run, names: Names) -> str:
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
