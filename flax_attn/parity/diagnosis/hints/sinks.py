"""Faults of attention sinks: an extra key with a score but no value."""

import numpy as np

from .evidence import Values


def without_sinks(weights: np.ndarray) -> Values:
    """Torch's weights without their first or last key, in case it is a sink."""
    if weights.shape[-1] < 2:
        return
    for at, what in ((-1, "last"), (0, "first")):
        others = weights.copy()
        others[..., at] = 0.0
        with np.errstate(all="ignore"):
            alone = others / others.sum(-1, keepdims=True)
        hint = f"the sink left out: torch's softmax has it, the {what} key, in its denominator"
        yield hint, np.nan_to_num(alone)
