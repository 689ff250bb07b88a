"""Inputs beside the tokens that only hide keys or add to the logits: masks and biases."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .attention import Attention, Leaves

# Of two float64 results of some hundred operations each.
CLOSE = 1e-9


def without_masks(attention: Attention) -> Attention:
    """The attention with masks and biases of the caller replaced by such as do nothing.

    Each input is replaced by zeros, or by ones if it is boolean and those hide less. It stays if
    that changes more than which keys are visible and what is added to the logits: the angles of a
    rotation, say.
    """
    for number in _others(attention):
        best = attention
        for leaf in _neutral(attention.program.tape.values[number]):
            changed = replace(attention, neutral={**attention.neutral, number: leaf})
            if _is_mask_or_bias(attention, changed) and _hides_less(changed, best):
                best = changed
        attention = best
    return attention


def _others(attention: Attention) -> list[int]:
    """Numbers of the inputs from which no projection is made."""
    program = attention.program
    projected = {projection.value for projection in program.projections}
    numbers = program.inputs
    reached = {x: {o for node in program.behind(x) for o in node.outs} for x in numbers}
    before = {w for pair in program.softmaxes for w in pair}
    heads = attention.heads
    made = {h.projection.value for h in (*heads.query, *heads.key, *heads.value)}
    return [x for x in numbers if not reached[x] & made & projected and reached[x] & before]


def _neutral(value: Any) -> Iterator[Any]:
    import torch

    if value.dtype == torch.bool:
        yield torch.ones_like(value)
    if not value.is_complex():
        yield torch.zeros_like(value)


def _is_mask_or_bias(one: Attention, other: Attention) -> bool:
    """Whether the part of the logits that is odd in the queries is the same."""
    shown = one.visible & other.visible
    random = np.random.RandomState(4)
    width, heads = one.roles.head_dim, one.heads
    query, key = (random.standard_normal((len(x), width)) for x in (heads.query, heads.key))

    def odd(attention: Attention) -> np.ndarray:
        def scores(sign: float) -> np.ndarray:
            leaves: Leaves = attention.put("key", key, attention.put("query", sign * query))
            return attention.scores(leaves)

        return ((scores(1.0) - scores(-1.0)) / 2)[shown]

    before, after = odd(one), odd(other)
    return bool(shown.any() and np.abs(after - before).max() <= CLOSE * np.abs(before).max())


def _hides_less(one: Attention, other: Attention) -> bool:
    """Whether more is visible, or the same and it is another bias."""
    return bool((one.visible | ~other.visible).all())
