"""Short causal convolution, as before many recurrences, with its own state."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import valid_tokens
from .._internal.types import wide
from ..sharding.rows import by_rows
from .documents import begins, check_segments

AXES = {  # of the inputs; w are the filter taps, v the tokens before the first
    "x": "*td",
    "weight": "dw",
    "bias": "d",
    "segments": "*t",
    "valid": "*t",
    "state": "*vd",
}


def causal_convolution(
    x: Float[Array, "*B T D"],
    weight: Float[Array, "D W"],
    bias: Float[Array, " D"] | None = None,
    *,
    segments: Int[Array, "*#B T"] | None = None,
    valid: Bool[Array, "*#B T"] | None = None,
    state: Float[Array, "*B V D"] | None = None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B V D"]]:
    """`y_t = sum_(i < W) weight[:, W - 1 - i] x_(t - i) + bias`; outputs and the last V = W - 1 x.

    Depthwise: each component is convolved separately. Sums run in float32 or wider; outputs and
    state have the dtype of x.

    Args:
      x: the tokens.
      weight: the last column multiplies the token itself, as in torch's `Conv1d(D, D, W, groups=D,
        padding=W - 1)`, truncated to T.
      bias: added at the end, or None.
      segments: ids of packed documents; tokens before a document count as zero for it.
      valid: False for padding: the tokens around it are neighbours, its output is zero, and its
        values, NaN included, affect nothing.
      state: the V tokens before the first; None for zeros.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for ids that are no integers, or a `valid` that is not boolean.

    Source: the short convolutions of Mamba (Gu and Dao, 2023).

    >>> y, state = causal_convolution(jnp.asarray([[1.0], [2.0]]), jnp.asarray([[10.0, 1.0]]))
    >>> y.ravel().tolist(), state.tolist()
    ([1.0, 12.0], [[2.0]])
    """
    _check(x, weight, bias, state)
    tokens = {"x": x, "segments": segments, "valid": valid, "state": state}
    return by_rows(_convolution, (), AXES, ("*td", "*vd"), "d", **tokens, weight=weight, bias=bias)


def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: Any = None,
    segments: Any = None,
    valid: Any = None,
    state: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`causal_convolution` on one device."""
    token_mask = None if valid is None else valid_tokens("valid", valid, x.shape[:-1])
    documents = _documents(segments, token_mask, x.shape[:-1])
    if token_mask is None:
        count = jnp.full((*x.shape[:-2], 1), x.shape[-2], jnp.int32)
        return _convolved(x, documents, count, weight, bias, state)
    # *B T: move padding to the end, convolve, and put the outputs back.
    order = jnp.argsort(~token_mask, axis=-1, stable=True)
    x = jnp.take_along_axis(jnp.where(token_mask[..., None], x, 0), order[..., None], axis=-2)
    documents = jnp.take_along_axis(documents, order, axis=-1)
    count = token_mask.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    y, last = _convolved(x, documents, count, weight, bias, state)
    rank = jnp.maximum(jnp.cumsum(token_mask, axis=-1, dtype=jnp.int32) - 1, 0)  # *B T
    y = jnp.take_along_axis(y, rank[..., None], axis=-2)
    return jnp.where(token_mask[..., None], y, 0), last


@jax.jit
def _convolved(
    x: jax.Array, documents: jax.Array, count: jax.Array, weight: Any, bias: Any, state: Any
) -> tuple[jax.Array, jax.Array]:
    """Outputs, and the state after the first `count` tokens of each row."""
    before = (*x.shape[:-2], weight.shape[-1] - 1)
    start = jnp.zeros((*before, x.shape[-1]), x.dtype) if state is None else state.astype(x.dtype)
    whole = jnp.concatenate([start, x], axis=-2)  # *B V+T D
    documents = jnp.concatenate([jnp.zeros(before, documents.dtype), documents], axis=-1)
    # Recomputed in the backward pass: its W shifted copies of x would be residuals.
    y = jax.checkpoint(_taps)(whole, documents, weight, bias)
    return y, _last(whole, documents, before[-1], count)


def _taps(
    whole: jax.Array, documents: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """Sum over the last W tokens of each token's own document."""
    width, length = weight.shape[-1], whole.shape[-2] - weight.shape[-1] + 1
    kind = max(wide(whole.dtype), wide(weight.dtype), key=lambda dtype: dtype.itemsize)
    token_documents = documents[..., width - 1 :]
    y = jnp.zeros((1,) * whole.ndim, kind)
    for i in range(width):
        same = documents[..., i : i + length] == token_documents
        x = jnp.where(same[..., None], whole[..., i : i + length, :], 0).astype(kind)
        y = y + x * _like(weight[:, i], x)
    y = y if bias is None else y + _like(bias, y)
    return y.astype(whole.dtype)


def _last(whole: jax.Array, documents: jax.Array, most: int, count: jax.Array) -> jax.Array:
    """The last V tokens, zero if they belong to another document than the last token."""
    index = count + jnp.arange(most, dtype=jnp.int32).reshape((1,) * (count.ndim - 1) + (-1,))
    last_document = jnp.take_along_axis(documents, jnp.maximum(count + most - 1, 0), axis=-1)
    same = jnp.take_along_axis(documents, index, axis=-1) == last_document
    return jnp.where(same[..., None], jnp.take_along_axis(whole, index[..., None], axis=-2), 0)


def _documents(segments: Any, token_mask: Any, tokens: tuple[int, ...]) -> jax.Array:
    """Index of each token's document, `*B T`, from 0."""
    if segments is None:
        return jnp.zeros(tokens, jnp.int32)
    first = begins(check_segments(segments, tokens), token_mask)
    return jnp.cumsum(first, axis=-1, dtype=jnp.int32)


def _like(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.astype(like.dtype).reshape((1,) * (like.ndim - 1) + x.shape)


def _check(x: Any, weight: Any, bias: Any, state: Any) -> None:
    width = x.shape[-1]
    if weight.ndim != 2 or weight.shape[0] != width or weight.shape[1] < 1:
        raise ValueError(f"weight must be D W with D={width}; got {weight.shape}.")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias must be of shape ({width},); got {bias.shape}.")
    before = (*x.shape[:-2], weight.shape[1] - 1, width)
    if state is not None and state.shape != before:
        raise ValueError(f"state must hold W - 1 tokens, {before}; got {state.shape}.")
