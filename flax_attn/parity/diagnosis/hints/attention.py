"""Faults inside attention: scale, score, mask, softmax, heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ... import judge
from ...sides.run import Step
from .chain import apply, is_mask, is_scalar, product, replay, softmax, steps_of
from .evidence import Evidence, Guesses, times
from .masks import hidden_later, other_mask, rows_of_weights
from .recompute import Attention
from .sinks import without_sinks
from .softcaps import other_caps


def scores(evidence: Evidence) -> Guesses:
    """Guesses for scores: a fault in a step between the product and the softmax."""
    query, key = evidence.call.inputs.get("query"), evidence.call.inputs.get("key")
    if query is None or key is None:
        return
    raw = product(query, key)
    steps = steps_of(evidence, raw)
    yield from other_mask(evidence, raw, steps)
    yield from _other_scale(evidence, raw, steps)
    yield from _steps_changed(raw, steps)
    yield from other_caps(evidence, raw, steps)
    yield from _other_products(evidence, query, key, steps)


def _other_scale(evidence: Evidence, raw: np.ndarray, steps: Sequence[Step]) -> Guesses:
    at = next((i for i, step in enumerate(steps) if is_scalar(step)), None)
    scale = 1.0
    if at is not None:
        one = apply(steps[at], np.ones(steps[at].shape)).flat[0]
        scale = float(one)
    sizes = evidence.sizes()
    factors = {"the other sign": -scale, "not scaled": 1.0}
    for what, size in sizes.items():
        factors |= {
            f"scaled by the root of {what}": size**-0.5,
            f"scaled by {what}, not its root": 1.0 / size,
            f"multiplied with the root of {what}": size**0.5,
        }
    factors |= {"scaled twice": scale**2, "scaled by half": scale / 2, "scaled double": scale * 2}
    for what, factor in factors.items():
        if factor != scale:
            made = _family(raw, steps, at, factor / scale)(1.0)
            yield f"another scale: {what}", _all_or_nothing(made)
    family = _family(raw, steps, at, 2.0)
    yield lambda share: f"another scale: {times(1 + share)} times torch's", family


def _all_or_nothing(value: np.ndarray):
    """A guess that cannot apply partially."""
    return lambda share: value if share == 1.0 else None


def _family(raw: np.ndarray, steps: Sequence[Step], at: int | None, ratio: float):
    """Scores whose product is multiplied by 1 (share 0) to `ratio` (share 1)."""

    def family(share: float) -> np.ndarray:
        factor = 1 + share * (ratio - 1)
        if at is None:
            return replay(steps, raw * factor)
        return replay(steps[at + 1 :], factor * replay(steps[: at + 1], raw))

    return family


def _steps_changed(raw: np.ndarray, steps: Sequence[Step]) -> Guesses:
    """A step missing, applied twice or at another position."""
    kinds = [step.name for step in steps]
    at = kinds.index("tanh") if "tanh" in kinds else None
    if at is not None:
        before, after = steps[: max(at - 1, 0)], steps[at + 2 :]
        cap = steps[max(at - 1, 0) : at + 2]
        yield "the softcap missing", replay([*before, *after], raw)
        yield "the softcap not multiplied back", replay([*before, *cap[:2], *after], raw)
        yield "the softcap done twice", replay([*before, *cap, *cap, *after], raw)
        yield "the softcap after all else, the mask too", replay([*before, *after, *cap], raw)
        for i, step in enumerate(after):
            what = "mask" if is_mask(step) else "bias"
            moved = [*before, *after[: i + 1], *cap, *after[i + 1 :]]
            yield f"the softcap after the {what}", replay(moved, raw)
            replayed = [*before, *cap, *after[: i + 1], *cap, *after[i + 1 :]]
            yield f"the softcap done again after the {what}", replay(replayed, raw)
    for i, step in enumerate(steps):
        if is_mask(step):
            continue
        others = [*steps[:i], *steps[i + 1 :]]
        if not is_scalar(step) and step.name in ("add", "sub", "rsub", "mul"):
            yield "the score's bias missing", replay(others, raw)
            yield from _other_bias(raw, steps, i)
    for (i, one), (j, two) in pairwise(enumerate(steps)):
        swapped = [*steps[:i], two, one, *steps[j + 1 :]]
        yield f"{one.name} and {two.name} in the other order", replay(swapped, raw)


def _other_bias(raw: np.ndarray, steps: Sequence[Step], i: int) -> Guesses:
    """The bias at step `i` with another sign, head order, key order or scale."""
    step = steps[i]
    place = next((n for n, x in enumerate(step.others) if isinstance(x, np.ndarray)), None)
    if place is None:
        return
    bias = step.others[place]
    others = {"with the other sign": -bias, "doubled": 2 * bias, "halved": bias / 2}
    if bias.ndim > 2:
        others["its heads reversed"] = np.flip(bias, -3)
    if bias.ndim > 1:
        others["its keys reversed"] = np.flip(bias, -1)
    if bias.ndim > 1 and bias.shape[-1] == bias.shape[-2]:
        others["transposed"] = np.swapaxes(bias, -1, -2)
    for what, other in others.items():
        operands = (*step.others[:place], other, *step.others[place + 1 :])
        changed = [*steps[:i], replace(step, others=operands), *steps[i + 1 :]]
        yield f"the score's bias, {what}", replay(changed, raw)


def _other_products(
    evidence: Evidence, query: np.ndarray, key: np.ndarray, steps: Sequence[Step]
) -> Guesses:
    """Queries and keys exchanged, or keys of other heads."""
    if query.shape == key.shape:
        yield "queries and keys exchanged", replay(steps, product(key, query))
    heads = evidence.plain.shape[-3] if evidence.plain.ndim > 3 else 1
    for what, order in orders(heads):
        batch = key.shape[0] // heads
        other = key.reshape(batch, heads, *key.shape[1:])[:, order].reshape(key.shape)
        yield f"keys of other heads: {what}", replay(steps, product(query, other))


def heads_together(
    evidence: Evidence, attention: Attention
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Keys and values both taken from other heads."""
    heads, parts = evidence.heads(), attention.parts
    if "value" not in parts or any(len(parts[point]) % heads for point in ("key", "value")):
        return
    for what, order in orders(heads):
        changed = {}
        for point in ("key", "value"):
            split = parts[point].reshape(-1, heads, *parts[point].shape[1:])
            changed[point] = split[:, order].reshape(parts[point].shape)
        yield f"keys and values of other heads: {what}", changed


def orders(heads: int):
    """Wrong head orders that typical mistakes produce."""
    if heads < 2:
        return
    plain = np.arange(heads)
    yield "one head for all", np.zeros_like(plain)
    yield "reversed", plain[::-1]
    yield "the next head's", np.roll(plain, -1)
    yield "the head before's", np.roll(plain, 1)
    for group in range(2, heads):
        if heads % group == 0:
            tiled = np.tile(plain[::group], group)
            yield f"tiled, not repeated {group} times: head n of K shares with n % K", tiled
            few = np.repeat(plain[: heads // group], group)
            yield f"repeated {group} times, not tiled: head n shares with n // {group}", few
            yield f"in groups of {group}, transposed", plain.reshape(-1, group).T.ravel()


def weights(evidence: Evidence) -> Guesses:
    """Guesses for attention weights: another softmax."""
    score = evidence.call.inputs.get("scores")
    if score is None:
        return
    yield from rows_of_weights(evidence, score)
    yield from hidden_later(score)
    yield from without_sinks(evidence.plain)
    yield from _other_axes(evidence.plain, score)
    narrow = softmax(score.astype(np.float32), -1)
    yield "a softmax in float32", narrow.astype(np.float64)
    yield "a softmax in base 2", softmax(score * np.log(2), -1)
    for what, factor in {"half": 0.5, "double": 2.0, "1.1": 1 / 1.1, "0.9": 1 / 0.9}.items():
        yield f"a softmax at temperature {what}", softmax(score * factor, -1)
    yield (
        lambda share: f"another temperature: scores times {times(1 + share)}",
        lambda share: softmax(score * (1 + share), -1),
    )
    most = score.max(-1, keepdims=True)
    powers = np.exp(score - np.where(np.isfinite(most), most, 0.0))
    total = powers.sum(-1, keepdims=True)
    yield (
        lambda share: f"{share:.3g} more in the softmax's denominator, as a sink adds",
        lambda share: powers / (total + share),
    )
    with np.errstate(all="ignore"):
        yield "a sigmoid, not a softmax", 1 / (1 + np.exp(-score))
        yield "a log-softmax", np.log(softmax(score, -1))
        yield "scores divided by their sum, no softmax", score / score.sum(-1, keepdims=True)
        finite = np.isfinite(score)
        if not finite.all():
            yield "softmax of unmasked scores", softmax(np.where(finite, score, 0.0), -1)
    yield "weights squared", softmax(score, -1) ** 2
    yield (
        "uniform weights: the scores do not arrive",
        finite / np.maximum(finite.sum(-1, keepdims=True), 1),
    )


def _other_axes(plain: np.ndarray, score: np.ndarray) -> Guesses:
    """A softmax over an axis other than torch's, which is identified first."""
    finite = np.where(np.isfinite(score), score, -1e30)
    made = {}
    for back in range(1, score.ndim + 1):
        axes = {1: "keys", 2: "queries", 3: "heads", 4: "the batch"}
        made[axes.get(back, f"axis -{back}")] = softmax(finite, -back)
    torch_axis = next(
        (what for what, x in made.items() if judge.same_function(x, plain).ok), "keys"
    )
    for what, value in made.items():
        if what != torch_axis:
            yield f"a softmax over the wrong axis, {what}, torch's over {torch_axis}", value


def context(evidence: Evidence) -> Guesses:
    """Guesses for contexts: other values, heads or weights."""
    weight, value = evidence.call.inputs.get("weights"), evidence.call.inputs.get("value")
    if weight is None or value is None:
        return
    for what, other in without_sinks(weight):
        yield what, other @ value
    if weight.shape[-1] == weight.shape[-2]:
        yield "the weights transposed", np.swapaxes(weight, -1, -2) @ value
    for point, what in (("key", "keys"), ("query", "queries")):
        other = evidence.at_point(point)
        if other is not None and other.shape == value.shape:
            yield f"{what} in the place of values", weight @ other
    scored = evidence.at_point("scores")
    heads = scored.shape[-3] if scored is not None and scored.ndim > 3 else 1
    for what, order in orders(heads):
        split = value.reshape(-1, heads, *value.shape[-2:])
        yield f"values of other heads: {what}", weight @ split[:, order].reshape(value.shape)
    yield "weights in float32", weight.astype(np.float32).astype(np.float64) @ value
    sums = weight.sum(-1, keepdims=True)
    yield "weights renormalised after dropout or mask", (weight / np.where(sums, sums, 1)) @ value
    unweighted = np.ones_like(weight) / weight.shape[-1]
    yield "a mean of the values, no weights", unweighted @ value
