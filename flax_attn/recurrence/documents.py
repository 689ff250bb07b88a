"""Where a document begins among packed ones, and what padding has to do with it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._checks import of_tokens


def begins(
    segments: Int[Array, "*B T"], valid: Bool[Array, "*B T"] | None = None
) -> Bool[Array, "*B T"]:
    """True for the first token of a document, unless it is the first of its row.

    A token begins a document if its id is not that of the valid token before it. The first token
    of a row goes on with whatever state there is. A token that is not valid begins nothing.

    >>> begins(jnp.asarray([7, 7, 3, 3, 7])).astype(int).tolist()
    [0, 0, 1, 0, 1]
    """
    places = jnp.arange(segments.shape[-1], dtype=jnp.int32)
    if valid is None:
        first = jnp.zeros((*segments.shape[:-1], min(1, segments.shape[-1])), bool)
        return jnp.concatenate([first, segments[..., 1:] != segments[..., :-1]], axis=-1)
    last = jnp.where(valid, places.reshape((1,) * (valid.ndim - 1) + (-1,)), -1)  # *B T
    last = jax.lax.cummax(last, axis=last.ndim - 1)
    before = jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], axis=-1)
    ids = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=-1)
    return valid & (before >= 0) & (ids != segments)


def check_segments(segments: Any, tokens: tuple[int, ...]) -> Int[Array, "*B T"]:
    """Ids as integers `*B T`.

    Raises:
      TypeError: if they are no integers.
      ValueError: if they do not broadcast to the tokens' axes.

    >>> check_segments([0, 0, 1], (2, 3)).tolist()
    [[0, 0, 1], [0, 0, 1]]
    """
    ids = jnp.asarray(segments)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segments must hold integers, one id a document; got {ids.dtype}.")
    return of_tokens("segments", ids, tokens)
