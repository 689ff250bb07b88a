"""Elementwise recurrence `h_t = a_t h_(t-1) + x_t`, by an associative scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import unify_varying
from .._internal.checks import valid_tokens
from .._internal.types import wide
from ..sharding.rows import by_rows
from .documents import begins, check_segments

BLOCK = 128  # tokens of a block, for lengths that jax.export left symbolic
AXES = {"x": "*td", "log_decay": "*td", "segments": "*t", "valid": "*t", "state": "*d"}


def elementwise_recurrence(
    x: Float[Array, "*B T D"],
    log_decay: Float[Array, "*B T D"],
    *,
    segments: Int[Array, "*#B T"] | None = None,
    valid: Bool[Array, "*#B T"] | None = None,
    state: Float[Array, "*B D"] | None = None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B D"]]:
    """`h_t = exp(log_decay_t) h_(t-1) + x_t` for each component; all h and the last one.

    Computed in float32 or wider by an associative scan, in about log T steps. The backward pass is
    another such scan; its residuals are h and the decay. A length that `jax.export` left symbolic
    is processed in blocks of 128 tokens, one after another. Outputs have the dtype of x, the state
    is float32 or wider.

    Args:
      x: inputs.
      log_decay: at most 0; -inf empties the state.
      segments, valid, state: as of `linear_recurrence`.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for ids that are no integers, or a `valid` that is not boolean.

    Source: Blelloch, "Prefix Sums and Their Applications", 1990; De et al., "Griffin: Mixing Gated
    Linear Recurrences with Local Attention for Efficient Language Models", 2024.

    >>> h, last = elementwise_recurrence(jnp.ones((3, 1)), jnp.zeros((3, 1)))
    >>> h.ravel().tolist(), last.tolist()
    ([1.0, 2.0, 3.0], [3.0])
    """
    whole = (*x.shape[:-2], x.shape[-1])
    if log_decay.shape != x.shape or x.ndim < 2:
        raise ValueError(
            f"x and log_decay must have one shape *B T D; got {x.shape} and {log_decay.shape}."
        )
    if state is not None and state.shape != whole:
        raise ValueError(f"state must be *B D = {whole}; got {state.shape}.")
    tokens = {"x": x, "log_decay": log_decay, "segments": segments, "valid": valid}
    return by_rows(_elementwise, (), AXES, ("*td", "*d"), "d", **tokens, state=state)


def _elementwise(
    x: jax.Array, log_decay: jax.Array, segments: Any = None, valid: Any = None, state: Any = None
) -> tuple[jax.Array, jax.Array]:
    """`elementwise_recurrence` on one device."""
    whole = (*x.shape[:-2], x.shape[-1])
    kinds = [wide(a.dtype) for a in (x, log_decay, state) if a is not None]
    kind = max(kinds, key=lambda dtype: dtype.itemsize)
    token_mask = None if valid is None else valid_tokens("valid", valid, x.shape[:-1])
    g, added = log_decay.astype(kind), x.astype(kind)
    if token_mask is not None:
        g, added = (jnp.where(token_mask[..., None], a, 0) for a in (g, added))
    if segments is not None:
        first = begins(check_segments(segments, x.shape[:-1]), token_mask)
        g = jnp.where(first[..., None], -jnp.inf, g)
    start = jnp.zeros(whole, kind) if state is None else state.astype(kind)
    h = _recur(*unify_varying((added, jnp.exp(g), start)))
    last = h[..., -1, :] if x.shape[-2] else start
    h = h if token_mask is None else jnp.where(token_mask[..., None], h, 0)
    return h.astype(x.dtype), last


@jax.custom_vjp
def _recur(x: jax.Array, a: jax.Array, start: jax.Array) -> jax.Array:
    """`h_t = a_t h_(t-1) + x_t` from `start`, over the axis before the last."""
    return _scan(x, a, start, reverse=False)


def _scan(x: jax.Array, a: jax.Array, start: jax.Array, reverse: bool) -> jax.Array:
    if is_symbolic_dim(x.shape[-2]):
        return _scan_blocks(x, a, start, reverse)
    if not x.shape[-2]:
        return x
    first = -1 if reverse else 0
    x = x.at[..., first, :].add(a[..., first, :] * start)

    def then(one: Any, two: Any) -> Any:
        return two[0] * one[0], two[0] * one[1] + two[1]

    return jax.lax.associative_scan(then, (a, x), reverse=reverse, axis=x.ndim - 2)[1]


def _scan_blocks(x: jax.Array, a: jax.Array, start: jax.Array, reverse: bool) -> jax.Array:
    """`_scan` block by block: jax has no associative scan over a symbolic length."""
    length, count = x.shape[-2], -(-x.shape[-2] // BLOCK)
    more = [(0, 0)] * (x.ndim - 2) + [(0, count * BLOCK - length), (0, 0)]

    def blocks(y: jax.Array, fill: int) -> jax.Array:
        y = jnp.pad(y, more, constant_values=fill)
        return jnp.moveaxis(y.reshape(*y.shape[:-2], count, BLOCK, y.shape[-1]), -3, 0)

    def one(state: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        x, a = block
        h = _scan(x, a, state, reverse)
        return h[..., 0 if reverse else -1, :], h

    tokens = (blocks(x, 0), blocks(a, 1))  # padding does not change the state
    h = jnp.moveaxis(jax.lax.scan(one, start, tokens, reverse=reverse)[1], 0, -3)
    return h.reshape(*x.shape[:-2], count * BLOCK, x.shape[-1])[..., :length, :]


def _forward(x: jax.Array, a: jax.Array, start: jax.Array) -> tuple[jax.Array, Any]:
    h = _recur(x, a, start)
    return h, (a, h, start)


def _backward(residuals: Any, dh: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`dx_t = dh_t + a_(t+1) dx_(t+1)`, and `da_t = dx_t h_(t-1)`."""
    a, h, start = residuals
    after = jnp.concatenate([a[..., 1:, :], jnp.zeros_like(a[..., :1, :])], axis=-2)
    dx = _scan(dh, after, jnp.zeros_like(start), reverse=True)
    before = jnp.concatenate([start[..., None, :], h[..., :-1, :]], axis=-2)
    return dx, dx * before, (a[..., :1, :] * dx[..., :1, :]).sum(axis=-2)


_recur.defvjp(_forward, _backward)
