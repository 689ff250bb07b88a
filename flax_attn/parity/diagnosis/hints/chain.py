"""What torch did to the product of query and key, done again in numpy, with a change in it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...sides.run import Step


def product(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The raw scores, `(B N) T S`."""
    return query @ np.swapaxes(key, -1, -2)


def apply(step: Step, value: np.ndarray) -> np.ndarray:
    """One step on the value."""
    operands = list(step.others)
    operands[step.place] = value.reshape(step.shape)
    with np.errstate(all="ignore"):
        return OPERATIONS[step.name](*operands)


def replay(steps: Sequence[Step], value: np.ndarray) -> np.ndarray:
    """All steps in order."""
    for step in steps:
        value = apply(step, value)
    return value


def is_scalar(step: Step) -> bool:
    """Whether a step multiplies or divides by one number."""
    others = [x for i, x in enumerate(step.others) if i != step.place]
    single = all(not isinstance(x, np.ndarray) or x.size == 1 for x in others)
    return step.name in ("mul", "div") and single


def is_mask(step: Step) -> bool:
    """Whether a step hides."""
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
