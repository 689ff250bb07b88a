"""Replays torch's operations on the query-key product in numpy, with optional changes."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ... import judge
from ...sides.run import Step
from .evidence import Evidence


def product(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The raw scores, shape `(B N) T S`."""
    return query @ np.swapaxes(key, -1, -2)


def apply(step: Step, value: np.ndarray) -> np.ndarray:
    """Applies one step to `value`."""
    operands = list(step.others)
    operands[step.place] = value.reshape(step.shape)
    with np.errstate(all="ignore"):
        return OPERATIONS[step.name](*operands)


def replay(steps: Sequence[Step], value: np.ndarray) -> np.ndarray:
    """Applies all steps in order."""
    for step in steps:
        value = apply(step, value)
    return value


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """Softmax; fully masked rows give zeros, as in recorded values."""
    with np.errstate(all="ignore"):
        powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
        return np.nan_to_num(powers / powers.sum(axis=axis, keepdims=True))


def steps_of(evidence: Evidence, raw: np.ndarray) -> list[Step]:
    """The operations on the product: as recorded, or an equivalent for a fused call.

    A fused call records no steps. Its scores are the scaled product plus whatever its mask adds.
    """
    call, plain = evidence.call, evidence.plain
    if call.steps and all(prod(step.shape) == raw.size == plain.size for step in call.steps):
        return call.steps
    if raw.size != plain.size:
        return []
    raw, finite = raw.reshape(plain.shape), np.isfinite(plain)
    scale = call.facts.get("scale", _slope(raw, plain))
    added = np.where(finite, plain - scale * raw, 0.0)
    steps = [Step("mul", 0, (None, scale), plain.shape)] if scale != 1.0 else []
    if judge.error(added, np.zeros_like(added), float(np.linalg.norm(raw))) > judge.SAME_FUNCTION:
        steps.append(Step("add", 0, (None, added), plain.shape))
    if not finite.all():
        steps.append(Step("masked_fill", 0, (None, ~finite, -np.inf), plain.shape))
    return steps


def _slope(raw: np.ndarray, plain: np.ndarray) -> float:
    """Fits the scale of raw scores, up to a constant per row."""
    finite = np.isfinite(plain)
    count = np.maximum(finite.sum(-1, keepdims=True), 1)
    x, y = (np.where(finite, z, 0.0) for z in (raw, plain))
    x, y = (np.where(finite, z - z.sum(-1, keepdims=True) / count, 0.0) for z in (x, y))
    size = float(np.vdot(x, x))
    return float(np.vdot(x, y)) / size if size else 1.0


def is_scalar(step: Step) -> bool:
    """Whether a step multiplies or divides by a single number."""
    others = [x for i, x in enumerate(step.others) if i != step.place]
    single = all(not isinstance(x, np.ndarray) or x.size == 1 for x in others)
    return step.name in ("mul", "div") and single


def is_mask(step: Step) -> bool:
    """Whether a step masks."""
    if step.name in ("masked_fill", "where"):
        return True
    others = [x for x in step.others if isinstance(x, np.ndarray)]
    return step.name == "add" and any(_hides(x) for x in others)


def _hides(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" and bool((x < -1e4).any())


def _where(condition: Any, x: Any, y: Any) -> np.ndarray:
    return np.where(condition, x, y)


def _masked_fill(x: Any, mask: Any, value: Any) -> np.ndarray:
    return np.where(mask, value, x)


OPERATIONS = {
    "mul": lambda x, y: x * y,
    "div": lambda x, y, *_: x / y,
    "add": lambda x, y, *_: x + y,
    "sub": lambda x, y, *_: x - y,
    "rsub": lambda x, y, *_: y - x,
    "neg": lambda x: -x,
    "tanh": np.tanh,
    "clone": lambda x, *_: x,
    "_to_copy": lambda x, *_: x,
    "copy": lambda _, x, *__: x,
    "masked_fill": _masked_fill,
    "where": _where,
}
