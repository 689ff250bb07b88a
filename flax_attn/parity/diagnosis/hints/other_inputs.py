"""Faults in the input of a layer: another tap, or a sum with other parts."""

from collections.abc import Callable, Iterator

import numpy as np

from .evidence import Evidence, Guesses


def same_shape_taps(evidence: Evidence, x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Other taps of the same shape and dtype."""
    for name, value in evidence.truth.taps.items():
        if name != evidence.tap and value.shape == x.shape and value.dtype == x.dtype:
            yield name, value


def other_inputs(
    evidence: Evidence, x: np.ndarray, made: Callable[[np.ndarray], np.ndarray]
) -> Guesses:
    """The right layer on another input, for example without a norm or skip before it."""
    for name, value in same_shape_taps(evidence, x):
        if np.array_equal(value, x):
            continue
        yield f"its input is {name}", made(value)
        yield f"its input has {name} not added", made(x - value)
        yield f"its input has {name} added too", made(x + value)
        before = evidence.truth.calls[name].inputs.get("0")
        if before is not None and before.shape == x.shape and before.dtype == x.dtype:
            yield f"its input is that of {name}", made(before)
