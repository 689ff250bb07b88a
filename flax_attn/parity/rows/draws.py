"""Checks dropout masks: their keep rate, and that they depend on the random key."""

import math

import numpy as np

from .. import judge
from ..report import Row
from ..sides.leaves import counted
from ..sides.pair import Pair
from ..sides.run import Run, fit_mask

FEW = "{} has {} places in {} calls, too few to tell whether it changes with the random key"
FIXED = (
    "{} is the same for every random key: Flax draws it from a key of its own, so that every step "
    "of a training drops the same places; draw it from the module's rngs"
)
SHARED = (
    "{} is the same all along its axis {} of {} in Flax, where torch draws each place by itself"
)
MASKS = "dropout masks"
NUMBER = "Flax drew {} dropout masks, torch {}: dropout stands in different places"
INVERTED = ": the keep rate is inverted, it keeps with the probability with which torch drops"


def draws(pair: Pair, got: Run, torch_run: Run, rows: list[Row], notes: dict) -> None:
    """Adds a row for every mask that Flax drew: whether its distribution equals torch's.

    If Flax reused torch's masks instead, adds one row if their number or shapes differ.
    """
    message = _mismatch_reason(pair, got, torch_run)
    if message and not any(row.name == MASKS for row in rows):
        rows.append(Row(MASKS, "exact", "", "", judge.failed_fact(message)))
    if not got.redrawn:
        return
    reported: dict[str, None] = {}
    for i, (keep, rate) in enumerate(zip(got.keeps, torch_run.rates, strict=False)):
        name = counted(reported, got.places[i] or "dropout mask")
        reported[name] = None
        what = f"the dropout mask of {name}" if got.places[i] else name
        others = [masks[i] for masks in got.redrawn if i < len(masks)]
        message = draw_mismatch(what, keep, others, rate, got.rates[i])
        if not message and 0 < rate < 1 and _chance(keep, others, rate) >= judge.CHANCE:
            notes[FEW.format(what, keep.size, len(others) + 1)] = None
        if not any(row.name == name and row.kind == "exact" for row in rows):
            verdict = judge.failed_fact(message) if message else judge.Verdict("exact", 0.0, 0.0)
            rows.append(Row(name, "exact", "", "", verdict))


def _mismatch_reason(pair: Pair, got: Run, torch_run: Run) -> str:
    """Why torch's masks do not fit Flax's dropouts, or ""."""
    if len(got.keeps) != len(torch_run.keeps):
        return NUMBER.format(len(got.keeps), len(torch_run.keeps))
    wrong = pair.misplaced(got, torch_run)
    for i, (mine, want) in enumerate(zip(got.keeps, torch_run.keeps, strict=True)):
        if i == wrong or fit_mask(want, mine.shape) is None:
            flax_place, torch_place = (
                got.places[i] or "the module",
                torch_run.places[i] or "the module",
            )
            shapes = f"has shape {mine.shape} in {flax_place} of Flax and {want.shape} in "
            shapes += f"{torch_place} of torch"
            return f"dropout mask {i + 1} {shapes}"
    return ""


def draw_mismatch(
    what: str, keep: np.ndarray, others: list[np.ndarray], rate: float, flax_rate: float
) -> str:
    """What is wrong with how a mask is drawn, or "".

    Args:
      what: the mask's name.
      keep, others: the mask, and those of further calls with other random keys.
      rate: torch's keep rate.
      flax_rate: the rate that Flax passed to `jax.random.bernoulli`, NaN if unknown.
    """
    fixed = all(np.array_equal(keep, other) for other in others)
    if fixed and 0 < rate < 1 and _chance(keep, others, rate) < judge.CHANCE:
        return FIXED.format(what)
    axis = _shared(keep, rate)
    if axis is not None:
        return SHARED.format(what, axis, list(keep.shape))
    drawn = [keep] if fixed else [keep, *others]
    size = sum(mask.size for mask in drawn)
    share = sum(float(np.sum(mask)) for mask in drawn) / max(size, 1)
    known = not math.isnan(flax_rate)
    if known and not judge.allclose(np.asarray(flax_rate), np.asarray(rate)):
        share = flax_rate
    elif abs(share - rate) <= judge.SIGMAS * _deviation(rate, size):
        return ""
    sentence = f"{what} keeps {share:.3g} of its places in Flax and {rate:.3g} in torch"
    inverted_gap = abs(share - (1 - rate))
    inverted = inverted_gap <= judge.SIGMAS * _deviation(rate, size) and inverted_gap < abs(
        share - rate
    )
    return sentence + INVERTED if inverted else sentence


def _shared(keep: np.ndarray, rate: float) -> int | None:
    """The axis along which a mask is constant, if that is too unlikely for independent draws."""
    for axis, length in enumerate(keep.shape):
        along = rate**length + (1 - rate) ** length
        same = length > 1 and bool((keep == keep.take([0], axis)).all())
        if same and along ** (keep.size // length) < judge.CHANCE:
            return axis
    return None


def _deviation(rate: float, size: int) -> float:
    return math.sqrt(max(rate * (1 - rate), 0.0) / max(size, 1))


def _chance(keep: np.ndarray, others: list[np.ndarray], rate: float) -> float:
    """Probability that independent draws are all equal."""
    return (rate**2 + (1 - rate) ** 2) ** (keep.size * len(others))
