"""Recomputes one of torch's attentions with changes, up to the tap that differs.

A port may have no taps between its projections and its result, so that a fault in between shows
only at a later tap. It is found by introducing it into torch's attention and comparing that tap.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ... import judge
from ...sides.run import Step
from .chain import product, replay, softmax, steps_of
from .evidence import Evidence, Guesses

ORDER = ("query", "key", "value", "scores", "weights", "context")
NEXT = {
    **dict.fromkeys(("query", "key"), "scores"),
    "scores": "weights",
    **dict.fromkeys(("weights", "value"), "context"),
}
Changed = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Attention:
    """Torch's values at the points of one attention, by name, in torch's layouts.

    Attributes:
      parts: query, key, value, scores, weights, context, as far as torch's taps have them.
      steps: the operations from the query-key product to the scores.
      drop: the factor on the weights before they are multiplied by the values.
    """

    parts: dict[str, np.ndarray]
    steps: list[Step] = field(default_factory=list)
    drop: np.ndarray | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> "Attention | None":
        """The attention that the tap belongs to, if torch has taps of one there."""
        taps = evidence.truth.taps
        named = {point: evidence.name(point) for point in ORDER}
        parts = {point: taps[name] for point, name in named.items() if name in taps}
        if not {"query", "key", "scores", "weights"} <= parts.keys():
            return None
        if not _multiply(parts["query"], np.swapaxes(parts["key"], -1, -2), parts["scores"]):
            return None
        heads = parts["scores"].shape[-3] if parts["scores"].ndim > 3 else 1
        if "context" in parts and len(parts["context"].reshape(-1, *_tail(parts))) % heads:
            return None
        steps = steps_of(evidence.at("scores"), product(parts["query"], parts["key"]))
        used = None
        if "context" in parts:
            used = evidence.at("context").call.inputs.get("weights")
        drop = None
        if used is not None and used.size == parts["weights"].size:
            weights = parts["weights"].reshape(used.shape)
            drop = np.where(weights == 0, 1.0, used / np.where(weights == 0, 1.0, weights))
        return cls(parts, steps, drop)

    def recompute(self, changed: Changed) -> dict[str, np.ndarray]:
        """Recomputes all points that depend on the changed ones."""
        now = {**self.parts, **changed}
        if changed.keys() & {"query", "key"} and "scores" not in changed:
            raw = replay(self.steps, product(now["query"], now["key"]))
            now["scores"] = raw.reshape(self.parts["scores"].shape)
        if changed.keys() & {"query", "key", "scores"} and "weights" not in changed:
            now["weights"] = softmax(now["scores"])
        if changed and "context" not in changed and "value" in now and "context" in self.parts:
            now["context"] = self._mixed(now["weights"], now["value"])
        return now

    def _mixed(self, weights: np.ndarray, value: np.ndarray) -> np.ndarray:
        weights = weights.reshape(-1, *weights.shape[-2:])
        if self.drop is not None:
            weights = weights * self.drop.reshape(weights.shape)
        return (weights @ value).reshape(self.parts["context"].shape)

    def merged(self, context: np.ndarray) -> np.ndarray:
        """Contexts in the layout of an output projection's input, `B T (N e)`."""
        scores = self.parts["scores"]
        heads = scores.shape[-3] if scores.ndim > 3 else 1
        split = context.reshape(-1, heads, *context.shape[-2:])
        return np.swapaxes(split, 1, 2).reshape(len(split), split.shape[2], -1)

    def ratio(self, evidence: Evidence) -> np.ndarray | None:
        """The factor on merged contexts before the tap, or before its linear layer."""
        before, _ = _linear_of(evidence)
        merged = self.merged(self.parts["context"])
        if before is None or before.size != merged.size or before.dtype.kind != "f":
            return None
        with np.errstate(all="ignore"):
            ratio = np.where(merged == 0, 1.0, before.reshape(merged.shape) / merged)
        return ratio if np.isfinite(ratio).all() else None


def _multiply(left: np.ndarray, right: np.ndarray, made: np.ndarray) -> bool:
    """Whether the shapes fit a matrix product, since taps of other values may have these names."""
    if min(left.ndim, right.ndim) < 2 or left.shape[-1] != right.shape[-2]:
        return False
    if left.shape[:-2] != right.shape[:-2]:
        return False
    return left.size // max(left.shape[-1], 1) * right.shape[-1] == made.size


def _tail(parts: Mapping[str, np.ndarray]) -> tuple[int, ...]:
    return parts["context"].shape[-2:]


Reach = Callable[[Changed], np.ndarray]


def _linear_of(evidence: Evidence) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Input and kernel of the tap's linear layer; without one, the tap itself and None."""
    weight, x = evidence.call.params.get("weight"), evidence.call.inputs.get("0")
    if weight is None or weight.ndim != 2 or x is None:
        return evidence.plain, None
    return x, weight if evidence.call.kind == "Conv1D" else weight.T


def reach(evidence: Evidence, attention: Attention) -> Reach | None:
    """The value at the differing tap as a function of the attention's points, or None."""
    if evidence.point in ORDER:
        return lambda now: now[evidence.point]
    if "context" not in attention.parts:
        return None
    before, kernel = _linear_of(evidence)
    ratio = attention.ratio(evidence)
    if ratio is None or before is None:
        return None

    def put(now: Changed) -> np.ndarray:
        value = attention.merged(now["context"]) * ratio * now.get("gate", 1.0)
        value = value.reshape(before.shape)
        return value if kernel is None else value @ kernel + evidence.call.params.get("bias", 0.0)

    return put if judge.same_function(put(attention.parts), evidence.plain).ok else None


def untapped_points(evidence: Evidence) -> list[str]:
    """Points that reach the differing tap without passing through another tap of Flax."""
    tapped = {point for point in ORDER if evidence.name(point) in evidence.tapped}
    points = []
    for point in ORDER:
        at: str | None = point
        while at is not None and at != evidence.point and at not in tapped:
            at = NEXT.get(at)
        arrives = at == evidence.point if evidence.point in ORDER else at is None
        if arrives and point != evidence.point:
            points.append(point)
    return points


def earlier(evidence: Evidence, points: Mapping[str, Callable[[Evidence], Guesses]]) -> Guesses:
    """Guesses about earlier points without a tap in Flax, propagated to the differing tap."""
    attention = Attention.of(evidence)
    reach_fn = None if attention is None else reach(evidence, attention)
    if attention is None or reach_fn is None:
        return
    for point in untapped_points(evidence):
        if point in attention.parts and point in points:
            for what, value in points[point](evidence.at(point)):
                yield what, carried(attention, reach_fn, point, value)


def carried(attention: Attention, reach_fn: Reach, point: str, value: Any) -> Callable:
    """Propagates a guess about one point to the differing tap."""

    def family(share: float) -> np.ndarray | None:
        plain = attention.parts[point]
        if callable(value):
            guess: Any = value(share)
        else:
            guess = value if share == 1.0 else plain + share * (value - plain)
        if guess is None or guess.size != plain.size:
            return None
        return reach_fn(attention.recompute({point: guess.reshape(plain.shape)}))

    return family


def together(
    evidence: Evidence, changes: Callable[[Evidence, Attention], Iterator[tuple[str, Changed]]]
) -> Guesses:
    """Guesses about several points at once, restricted to those without a tap in Flax."""
    attention = Attention.of(evidence)
    reach_fn = None if attention is None else reach(evidence, attention)
    if attention is None or reach_fn is None:
        return
    free = untapped_points(evidence)
    for what, changed in changes(evidence, attention):
        changed = {k: value for k, value in changed.items() if k in free or k == "gate"}
        if changed:
            yield what, reach_fn(attention.recompute(changed))
