"""Warnings about arrays whose sizes let a mistake pass: both readings fit."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .caller import is_called_from_outside, warn_once

FEW = 64  # tokens, at most, where so many axes of heads are unlikely to be meant
RATIO = 4  # heads for each token, at least, that look like exchanged axes


def warn_if_padding(mask: Any, batch: tuple[int, ...], queries: int, keys: int) -> None:
    """Warns if a boolean array `T S` may be meant as `B T`, one flag for each token.

    Only where B, T and S are equal. A mask that is known to be causal is none of padding, and
    neither is a mask object: `Dense(array)` says that pairs are meant.
    """
    if not (isinstance(mask, jax.Array | np.ndarray) and mask.shape == (queries, keys)):
        return
    if (queries, keys) != (*batch, *batch):
        return
    if not isinstance(mask, Tracer) and np.array_equal(np.tril(mask), mask):
        return
    warn_once(
        f"A mask of shape {mask.shape} is read as (queries, keys), the same for all {queries} rows "
        "of the batch, which are as many. If it marks padding, (batch, keys), pass valid=mask to a "
        "layer, or mask=mask[:, None, None]. mask=Dense(mask) says that pairs are meant."
    )


def warn_if_unclear(q: Any, k: Any, v: Any, mask: Any) -> None:
    """Warns if arrays `*B T N H` look like `*B N T H`, or the mask like one of padding.

    A layer knows its axes, so only other callers of `attend` are warned. Far more heads than tokens
    look like exchanged axes; a few queries over a long cache have many keys, and do not.
    """
    shapes: Any = [getattr(x, "shape", ()) for x in (q, k, v)]
    if min(map(len, shapes)) < 3 or not all(isinstance(n, int) for x in shapes for n in x):
        return
    (*batch, tokens, heads, width), keys = shapes[0], shapes[1][-3]
    square = mask is not None and tuple(batch) == (tokens,) == (keys,)
    many = 1 < tokens <= FEW and keys <= tokens and heads >= RATIO * tokens
    swapped = many and {x[-1] for x in shapes} == {width}
    if not (square or swapped) or not is_called_from_outside(3):
        return
    warn_if_padding(mask, tuple(batch), tokens, keys)
    if swapped:
        warn_once(
            f"q {shapes[0]} is read as (*batch, {tokens} tokens, {heads} heads, {width}). If the "
            "heads come first, as in torch, swap the axes of q, k and v and of the output: "
            "x.swapaxes(-3, -2)."
        )
