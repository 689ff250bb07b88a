"""Chunkwise recurrence by matrix products, with a custom backward pass.

In a chunk that starts with state S, with D_ij the decay from token j to token i,

    u = v, or with the delta rule (I + tril(beta k k' D, -1))^-1 beta (v - since k S)
    o = since q S + tril(q k' D) u
    S <- through S + (until k)' u

`since` is the decay from the start of the chunk to a token, `until` from a token to its end. Each
is the exponential of a sum of log decays over exactly the tokens between, never a difference of
cumulative sums: nothing overflows, and a strong decay costs later tokens no digits.

The residuals of the backward pass are the states at chunk boundaries; the rest is recomputed.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.arrays import unify_varying
from .solve import solve_unit_lower
from .steps import Tokens

BLOCK = 8  # tokens of a block whose per-channel decays are computed for every pair


@partial(jax.jit, static_argnums=2)
def by_chunks(tokens: Tokens, state: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Outputs `*B T N h` and last state `*B N H h`, like `by_steps`, `chunk` tokens at a time."""
    results: Any = _recur(chunk, tokens, state)
    return results


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recur(chunk: int, tokens: Tokens, state: jax.Array) -> Any:
    return _forward(chunk, tokens, state)[0]


def _forward(chunk: int, tokens: Tokens, state: jax.Array) -> tuple[Any, Any]:
    def one(s: jax.Array, chunk: Tokens) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        after, o = _chunk(s, chunk)
        return after, (o, s)

    whole, start = unify_varying((tokens, state))
    last, (o, borders) = jax.lax.scan(one, start, _split(whole, chunk))
    return (_join(o, tokens.v.shape[-3]), last), (tokens, borders)


def _backward(chunk: int, residuals: Any, gradients: Any) -> tuple[Tokens, jax.Array]:
    tokens, borders = residuals
    do, ds = gradients

    # From the last chunk to the first: each needs only its start state and the gradient of its end.
    def one(ds: jax.Array, inputs: Any) -> tuple[jax.Array, Tokens]:
        s, chunk, do = inputs
        _, pull = jax.vjp(_chunk, s, chunk)
        return pull((ds, do))

    ds, borders, whole, do = unify_varying((ds, borders, tokens, do))
    chunks = _split(whole, chunk)
    ds, parts = jax.lax.scan(one, ds, (borders, chunks, _split(do, chunk)), reverse=True)
    return jax.tree.map(lambda x: _join(x, tokens.v.shape[-3]), parts), ds


_recur.defvjp(_forward, _backward)


def _split(tokens: Any, chunk: int) -> Any:
    """`*B T N X` to `C *B N chunk X`, padded with tokens that neither write nor decay."""

    def one(x: jax.Array) -> jax.Array:
        count = -(-x.shape[-3] // chunk)  # a form that jax.export can divide for symbolic lengths
        more = count * chunk - x.shape[-3]
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, more), (0, 0), (0, 0)])
        x = x.reshape(*x.shape[:-3], count, chunk, *x.shape[-2:])
        return jnp.swapaxes(jnp.moveaxis(x, -4, 0), -3, -2)

    return jax.tree.map(one, tokens)


def _join(chunks: jax.Array, length: int) -> jax.Array:
    """`C *B N chunk X` to `*B T N X`, without padding."""
    x = jnp.moveaxis(jnp.swapaxes(chunks, -3, -2), 0, -4)
    x = x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])
    return x[..., :length, :, :]


def _chunk(s: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """State after a chunk and its outputs `*B N C h`, for tokens `*B N C X`."""
    q, k, u, g, beta = jax.tree.map(lambda x: x.astype(s.dtype), tokens)
    if g is None:
        since = until = through = jnp.ones((1,) * s.ndim, s.dtype)
    else:
        # -inf would give -inf * 0 = NaN in the sums below; this decay is zero all the same.
        g = jnp.maximum(g, _min_log_decay(s.dtype))
        since, until = (jnp.exp(_sums(ones(g.shape[-2]), g)) for ones in (_ones_up_to, _ones_after))
        through = jnp.exp(g.sum(axis=-2, keepdims=True)).mT  # *B N H|1 1
    pairs = _pairs(k, g)  # a -> *B N C C
    if beta is not None:
        # Each token writes what the tokens before it, in this chunk too, have not written yet.
        u = solve_unit_lower(beta * pairs(k), beta * (u - (since * k) @ s))  # *B N C h
    o = (since * q) @ s + pairs(q) @ u
    return through * s + (until * k).mT @ u, o


def _pairs(k: jax.Array, g: jax.Array | None) -> Callable[[jax.Array], jax.Array]:
    """`a -> tril(a k' D)`, `*B N C C`: decayed products of each token with those up to it."""
    if g is not None and g.shape[-1] > 1:
        return _pairs_by_channel(k, g)
    past = _ones_up_to(k.shape[-2]) > 0  # C C
    past = past.reshape((1,) * (k.ndim - 2) + past.shape)
    if g is None:
        return lambda a: jnp.where(past, a @ k.mT, 0)
    between = jnp.asarray(_ones_after(g.shape[-2]).T, g.dtype)  # s j: 1 where s > j
    between = between.reshape((1,) * (g.ndim - 2) + between.shape) * g
    decay = jnp.where(past, jnp.exp(_sums(_ones_up_to(g.shape[-2]), between)), 0)  # *B N C C
    return lambda a: (a @ k.mT) * decay


def _pairs_by_channel(k: jax.Array, g: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """`a -> tril(sum_h a_ih k_jh D_ijh)`, for a decay of each channel.

    Within a block of few tokens decays are computed for every pair. Between blocks they factor into
    the decay from token j to the block of i and from there to i, so that a matrix product applies.
    """
    length, width = k.shape[-2:]
    size = math.gcd(length, BLOCK)
    count = length // size

    def blocks(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], count, size, width)  # *B N I c H

    kb, gb = blocks(k), blocks(g)
    lead = (1,) * (kb.ndim - 3)
    within_block = _exp(_ones_between(size), gb)  # *B N I c c H
    past = (_ones_up_to(size) > 0).reshape(*lead, 1, size, size, 1)
    within_block = jnp.where(past, within_block, 0) * kb[..., None, :, :]
    since, until = (
        jnp.exp(_sums(ones(size), gb)) for ones in (_ones_up_to, _ones_after)
    )  # *B N I c H
    across_blocks = _exp(_ones_between_blocks(count), gb.sum(axis=-2))  # *B N I J H
    earlier = (_ones_after(count).T > 0).reshape(*lead, count, count, 1)
    across_blocks = jnp.where(earlier, across_blocks, 0)[..., None, :]  # *B N I J 1 H
    from_earlier_blocks = (until * kb)[..., None, :, :, :] * across_blocks  # *B N I J c H

    def pairs(a: jax.Array) -> jax.Array:
        ab = blocks(a)
        inside = (ab[..., None, :] * within_block).sum(axis=-1)  # *B N I c c
        diagonal = jnp.eye(count, dtype=a.dtype).reshape(*lead, count, 1, count, 1)
        across = jnp.einsum("...Iih,...IJjh->...IiJj", since * ab, from_earlier_blocks)
        across = across + diagonal * inside[..., None, :]  # *B N I c J c
        return across.reshape(*k.shape[:-2], length, length)

    return pairs


def _sums(ones: np.ndarray, g: jax.Array) -> jax.Array:
    """`ones @ g` over the tokens, in full precision on every platform."""
    whole = jnp.asarray(ones, g.dtype)
    return jnp.einsum("is,...sx->...ix", whole, g, precision=jax.lax.Precision.HIGHEST)


def _exp(ones: np.ndarray, g: jax.Array) -> jax.Array:
    """`exp(sum_s ones_ijs g_s)`, `... i j x`, for g `... s x`."""
    whole = jnp.asarray(ones, g.dtype)
    return jnp.exp(jnp.einsum("ijs,...sx->...ijx", whole, g, precision=jax.lax.Precision.HIGHEST))


def _ones_up_to(n: int) -> np.ndarray:
    """`i s`: 1 where s <= i."""
    return np.tri(n)


def _ones_after(n: int) -> np.ndarray:
    """`i s`: 1 where s > i."""
    return np.tri(n, k=-1).T


def _ones_between(n: int) -> np.ndarray:
    """`i j s`: 1 where j < s <= i."""
    i, j, s = np.ogrid[:n, :n, :n]
    return ((j < s) & (s <= i)).astype(float)


def _ones_between_blocks(n: int) -> np.ndarray:
    """`i j s`: 1 where j < s < i."""
    i, j, s = np.ogrid[:n, :n, :n]
    return ((j < s) & (s < i)).astype(float)


def _min_log_decay(dtype: Any) -> float:
    """A log decay whose exponential is zero while sums of it stay finite."""
    return -750.0 if jnp.finfo(dtype).bits == 64 else -110.0
