"""Linear recurrence of linear attention, the delta rule and state-space models."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import unify_varying
from .._internal.checks import check_positive, valid_tokens
from .._internal.types import wide
from ..sharding.rows import by_rows
from .chunks import BLOCK, by_chunks
from .documents import begins, check_segments
from .steps import Tokens, by_steps

AXES = {  # of the inputs; w is the width of keys, h of values
    "q": "*tnw",
    "k": "*tnw",
    "v": "*tnh",
    "log_decay": "*tn",
    "beta": "*tn",
    "segments": "*t",
    "valid": "*t",
    "state": "*nwh",
}


def linear_recurrence(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B T N H"],
    v: Float[Array, "*B T N h"],
    *,
    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N H"] | None = None,
    beta: Float[Array, "*B T N"] | None = None,
    delta: bool = False,
    segments: Int[Array, "*#B T"] | None = None,
    valid: Bool[Array, "*#B T"] | None = None,
    state: Float[Array, "*B N H h"] | None = None,
    chunk: int | None = 64,
) -> tuple[Float[Array, "*B T N h"], Float[Array, "*B N H h"]]:
    """`S_t = exp(log_decay_t) S_(t-1) + k_t u_t'` and `o_t = S_t' q_t`; outputs and the last state.

    Also called: chunked linear attention, the delta rule, DeltaNet.

    u_t is `beta_t v_t`; with the delta rule `beta_t (v_t - k_t' exp(log_decay_t) S_(t-1))`, which
    replaces the value that the state stores for k_t. Sums run in float32 or wider. Outputs have the
    dtype of v, the state is float32 or wider.

    Args:
      q, k, v: queries, keys and values, already scaled and normalised.
      log_decay: of each head or of each channel of k, at most 0; -inf empties the state, None
        leaves it as it is.
      beta: write strength of a token; None for 1.
      delta: whether a token writes the difference between v and the stored value, not v.
      segments: ids of packed documents. A token whose id differs from the previous token's starts
        from an empty state, and no gradient passes there. The first token continues from `state`.
      valid: False for padding: it changes nothing, its output is zero, and its values, NaN
        included, affect nothing.
      state: before the first token; None for an empty one.
      chunk: tokens processed at once, by matrix products. The backward pass stores only the states
        at chunk boundaries. None processes them one by one, by a scan, which also has forward-mode
        derivatives.

    Raises:
      ValueError: for shapes that do not fit, or a chunk below 1.
      TypeError: for ids that are no integers, or a `valid` that is not boolean.

    Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence
    Length", 2024; Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.

    >>> q = k = jnp.ones((3, 1, 1))
    >>> o, state = linear_recurrence(q, k, jnp.asarray([1.0, 2.0, 3.0]).reshape(3, 1, 1))
    >>> o.ravel().tolist(), state.ravel().tolist()
    ([1.0, 3.0, 6.0], [6.0])
    """
    _check(q, k, v, log_decay, beta, state)
    if chunk is not None:
        check_positive(chunk=chunk)
    axes = AXES if log_decay is None or log_decay.ndim < k.ndim else {**AXES, "log_decay": "*tnw"}
    arrays = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta, "state": state}
    arrays |= {"segments": segments, "valid": valid}
    return by_rows(_linear, (delta, chunk), axes, ("*tnh", "*nwh"), "n", **arrays)


def _linear(
    delta: bool,
    chunk: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: Any = None,
    beta: Any = None,
    segments: Any = None,
    valid: Any = None,
    state: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`linear_recurrence` on one device."""
    kinds = [wide(x.dtype) for x in (q, k, v, log_decay, beta, state) if x is not None]
    kind = max(kinds, key=lambda dtype: dtype.itemsize)
    token_mask = None if valid is None else valid_tokens("valid", valid, q.shape[:-2])
    if token_mask is not None:
        q, k, v, log_decay, beta = (_zeroed(x, token_mask) for x in (q, k, v, log_decay, beta))
    tokens = _tokens(q, k, v, log_decay, beta, delta)
    if segments is not None:
        tokens = _reset(tokens, begins(check_segments(segments, q.shape[:-2]), token_mask))
    shape = (*k.shape[:-3], *k.shape[-2:], v.shape[-1])
    start = jnp.zeros(shape, kind) if state is None else state.astype(kind)
    tokens, start = unify_varying((tokens, start))
    if chunk is None or q.shape[-3] == 1:
        o, last = by_steps(tokens, start)
    else:
        o, last = by_chunks(tokens, start, _chunk_of(q.shape[-3], chunk))
    return o.astype(v.dtype), last


def _chunk_of(length: Any, most: int) -> int:
    """Chunk size: at most `most`, and no more than a static length needs."""
    if is_symbolic_dim(length):
        return most
    return min(most, max(-(-length // BLOCK) * BLOCK, 1))


def _tokens(q: jax.Array, k: jax.Array, v: jax.Array, g: Any, beta: Any, delta: bool) -> Tokens:
    """Inputs with equal ranks; beta is multiplied into v except for the delta rule."""
    g = g if g is None or g.ndim == k.ndim else g[..., None]
    if delta:
        beta = jnp.ones((*k.shape[:-1], 1), v.dtype) if beta is None else beta[..., None]
        return Tokens(q, k, v, g, beta)
    if beta is not None:
        kind = max(v.dtype, beta.dtype, key=lambda dtype: dtype.itemsize)
        v = v.astype(kind) * beta.astype(kind)[..., None]
    return Tokens(q, k, v, g, None)


def _zeroed(x: Any, token_mask: jax.Array) -> Any:
    """Zeros at padding, so that it neither writes nor decays."""
    if x is None:
        return None
    return jnp.where(token_mask.reshape(*token_mask.shape, *[1] * (x.ndim - token_mask.ndim)), x, 0)


def _reset(tokens: Tokens, first: jax.Array) -> Tokens:
    """Tokens whose log decay empties the state at the first token of each document."""
    first, g = first[..., None, None], tokens.log_decay  # *B T 1 1
    g = jnp.zeros(first.shape, wide(tokens.k.dtype)) if g is None else g
    return tokens._replace(log_decay=jnp.where(first, -jnp.inf, g))


def _check(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> None:
    """Raises ValueError for shapes that do not fit."""
    axes = k.shape[:-1]
    fits = k.ndim > 2 and q.shape == k.shape and v.shape[:-1] == axes
    if not fits:
        raise ValueError(
            "q and k must have one shape *B T N H, and v *B T N h; "
            f"got q {q.shape}, k {k.shape}, v {v.shape}."
        )
    if g is not None and g.shape not in (axes, k.shape):
        raise ValueError(
            f"log_decay must be *B T N = {axes} or *B T N H = {k.shape}; got {g.shape}."
        )
    if beta is not None and beta.shape != axes:
        raise ValueError(f"beta must be *B T N = {axes}; got {beta.shape}.")
    whole = (*axes[:-2], axes[-1], k.shape[-1], v.shape[-1])
    if state is not None and state.shape != whole:
        raise ValueError(f"state must be *B N H h = {whole}; got {state.shape}.")
