"""First tokens of packed documents, with padding anywhere."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import per_token, valid_tokens
from ..sharding.rows import by_rows

AXES = {  # of the inputs of `join_documents`
    "x": "*td",
    "segments": "*t",
    "valid": "*t",
    "segment": "*",
    "has_segment": "*",
}


def begins(
    segments: Int[Array, "*B T"], valid: Bool[Array, "*B T"] | None = None
) -> Bool[Array, "*B T"]:
    """True for the first token of a document, unless it is the first of its row.

    A token begins a document if its id differs from that of the last valid token before it. The
    first token of a row continues from the given state; `join_documents` compares it with the
    previous call. Padding never begins a document.

    >>> begins(jnp.asarray([7, 7, 3, 3, 7])).astype(int).tolist()
    [0, 0, 1, 0, 1]
    """
    places = jnp.arange(segments.shape[-1], dtype=jnp.int32)
    if valid is None:
        first = jnp.zeros((*segments.shape[:-1], min(1, segments.shape[-1])), bool)
        return jnp.concatenate([first, segments[..., 1:] != segments[..., :-1]], axis=-1)
    # The index of the last valid token before each token, by a running maximum.
    last = jnp.where(valid, places.reshape((1,) * (valid.ndim - 1) + (-1,)), -1)  # *B T
    last = jax.lax.cummax(last, axis=last.ndim - 1)
    before = jnp.concatenate([jnp.full_like(last[..., :1], -1), last[..., :-1]], axis=-1)
    ids = jnp.take_along_axis(segments, jnp.maximum(before, 0), axis=-1)
    return valid & (before >= 0) & (ids != segments)


class Joined(NamedTuple):
    """Relation of a call's documents to those of the previous call, for each row.

    Attributes:
      is_other: whether its first valid token belongs to another document than the last one before.
      segment, has_segment: as in `cache.State`, after the call.
    """

    is_other: Bool[Array, "*B"]
    segment: Int[Array, "*B"]
    has_segment: Bool[Array, "*B"]


def join_documents(
    x: Float[Array, "*B T D"],
    segments: Int[Array, "*#B T"],
    valid: Bool[Array, "*#B T"] | None,
    segment: Int[Array, "*B"],
    has_segment: Bool[Array, "*B"],
) -> Joined:
    """Whether a call continues the document of the previous call.

    Args:
      x: the tokens; only their axes matter.
      segments, valid: as of `linear_recurrence`; ids are compared as int32.
      segment, has_segment: as in `cache.State`, before the call.

    >>> x, ids, valid = jnp.ones((3, 1)), jnp.asarray([7, 3, 9]), jnp.asarray([True, True, False])
    >>> is_other, last, _ = join_documents(x, ids, valid, jnp.asarray(5), jnp.asarray(True))
    >>> bool(is_other), int(last)
    (True, 3)
    """
    tokens = {"x": x, "segments": segments, "valid": valid}
    before = {"segment": segment, "has_segment": has_segment}
    return Joined(*by_rows(_joined, (), AXES, ("*", "*", "*"), "", **tokens, **before))


def _joined(
    x: jax.Array, segments: Any, segment: Any, has_segment: Any, valid: Any = None
) -> tuple[jax.Array, ...]:
    """`join_documents` on one device."""
    ids = check_segments(segments, x.shape[:-1]).astype(jnp.int32)
    token_mask = valid_tokens("valid", valid, x.shape[:-1])
    places = jnp.arange(x.shape[-2], dtype=jnp.int32).reshape((1,) * (ids.ndim - 1) + (-1,))
    first = jnp.min(jnp.where(token_mask, places, ids.shape[-1]), axis=-1, initial=ids.shape[-1])
    last = jnp.max(jnp.where(token_mask, places, -1), axis=-1, initial=-1)

    def at(place: jax.Array) -> jax.Array:
        chosen = places == place[..., None]
        return jnp.where(chosen, ids, 0).sum(axis=-1, dtype=jnp.int32)

    exist = last >= 0
    is_other = has_segment & exist & (at(first) != segment)
    return is_other, jnp.where(exist, at(last), segment), has_segment | exist


def check_segments(segments: Any, tokens: tuple[int, ...]) -> Int[Array, "*B T"]:
    """Ids as integers `*B T`.

    Raises:
      TypeError: if they are not integers.
      ValueError: if they do not broadcast to the tokens' axes.

    >>> check_segments([0, 0, 1], (2, 3)).tolist()
    [[0, 0, 1], [0, 0, 1]]
    """
    ids = jnp.asarray(segments)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"segments must hold integers, one id a document; got {ids.dtype}.")
    return per_token("segments", ids, tokens)
