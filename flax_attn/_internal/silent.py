"""Warnings about arrays whose sizes let a mistake pass: both readings fit."""

from typing import Any

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
    if not mask.shape == (queries, keys) == (*batch, *batch):
        return
    if not isinstance(mask, Tracer) and np.array_equal(np.tril(mask), mask):
        return
    warn_once(
        f"A mask of shape {mask.shape} is read as (queries, keys), the same for all {queries} rows "
        "of the batch, which are as many. If it marks padding, (batch, keys), pass valid=mask to a "
        "layer, or mask=mask[:, None, None]. mask=Dense(mask) says that pairs are meant."
    )


def look_at_arrays(q: Any, k: Any, *_: Any, mask: Any, **call: Any) -> None:
    """Warns if a mask of `attend` may be meant as one of tokens."""
    if len(getattr(q, "shape", ())) == len(getattr(k, "shape", ())) == 4:
        warn_if_padding(mask, q.shape[:1], q.shape[1], k.shape[1])


def warn_if_heads_first(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Warns if shapes `*B T N H` with far more heads than tokens look like `*B N T H`.

    A layer knows its axes, so only other callers of `attend` are warned. A few queries over a long
    cache have many keys, and do not look like that.
    """
    if not (isinstance(k[-3], int) and k[-3] <= q[-3] and q[-1] == k[-1] == v[-1]):
        return
    if is_called_from_outside():
        warn_once(
            f"q {q} is read as (*batch, {q[-3]} tokens, {q[-2]} heads, {q[-1]}). If the heads come "
            "first, as in torch, swap the axes of q, k and v and of the output: "
            "x.swapaxes(-3, -2)."
        )
