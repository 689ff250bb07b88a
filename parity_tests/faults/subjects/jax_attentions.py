"""Masked attention with a bias and dropout, as a formula and as people rewrite it.

All take `q, k, v` of shape `B N T H` (keys and values `B N S H`), `seen` of booleans `T S` and a
bias `N T S`, and give `B N T H`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ...port import Port

HIGHEST = lax.Precision.HIGHEST


def formula(q, k, v, seen, bias):
    logits = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, logits + bias, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bnts,bnsh->bnth", weights, v)
    return mixed


def single(q, k, v, seen, bias):
    """Its softmax in float32, whatever comes in."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5 + bias.astype(jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", weights.astype(q.dtype), v)


def rows(q, k, v, seen, bias):
    """One query at a time, recomputed in the backward pass."""

    @jax.checkpoint
    def row(_, one):
        query, shown, add = one
        scores = jnp.einsum("bnh,bnsh->bns", query, k) * q.shape[-1] ** -0.5 + add
        weights = jax.nn.softmax(jnp.where(shown, scores, -jnp.inf), axis=-1)
        return None, jnp.einsum("bns,bnsh->bnh", weights, v)

    sequence = (jnp.moveaxis(q, 2, 0), seen, jnp.moveaxis(bias, 1, 0))
    return jnp.moveaxis(lax.scan(row, None, sequence)[1], 0, 2)


def each_head(q, k, v, seen, bias):
    """One head at a time by vmap, through matrix products."""

    def head(q, k, v, bias):
        scores = q @ k.T * q.shape[-1] ** -0.5 + bias
        scores = scores - lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), -1))[:, None]
        exps = jnp.where(seen, jnp.exp(jnp.where(seen, scores, 0.0)), 0.0)
        return (exps @ v) / exps.sum(-1, keepdims=True)

    return jax.vmap(jax.vmap(head), in_axes=(0, 0, 0, None))(q, k, v, bias)


def online(q, k, v, seen, bias, block=3):
    """Blocks of keys with a running maximum, sum and result, in float32."""
    padding = -k.shape[2] % block

    def cut(x, axis):
        x = jnp.pad(x, [(0, padding * (i == axis)) for i in range(x.ndim)])
        return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :]), axis, 0)

    def step(state, blocks):
        most, total, out = state
        keys, values, shown, add = blocks
        scores = jnp.einsum("bnth,bnsh->bnts", q, keys).astype(jnp.float32)
        scores = jnp.where(shown, scores * q.shape[-1] ** -0.5 + add, -1e30)
        top = jnp.maximum(most, scores.max(-1))
        exps = jnp.where(shown, jnp.exp(scores - top[..., None]), 0.0)
        keep = jnp.exp(most - top)
        out = out * keep[..., None] + jnp.einsum("bnts,bnsh->bnth", exps.astype(v.dtype), values)
        return (top, total * keep + exps.sum(-1), out), None

    shape = q.shape[:3]
    start = jnp.full(shape, -1e30, jnp.float32), jnp.zeros(shape, jnp.float32)
    blocks = cut(k, 2), cut(v, 2), cut(seen, 1), cut(bias, 2)
    (_, total, out), _ = lax.scan(step, (*start, jnp.zeros(q.shape, jnp.float32)), blocks)
    return (out / total[..., None]).astype(q.dtype)


def _kernel(q, k, v, seen, bias, out, *, scale):
    scores = jnp.dot(q[0], k[0].T, preferred_element_type=jnp.float32, precision=HIGHEST)
    scores = jnp.where(seen[...], scores * scale + bias[0].astype(jnp.float32), -1e30)
    exps = jnp.exp(scores - scores.max(-1, keepdims=True))
    values = v[0].astype(jnp.float32)
    made = jnp.dot(exps, values, preferred_element_type=jnp.float32, precision=HIGHEST)
    out[0] = (made / exps.sum(-1, keepdims=True)).astype(out.dtype)


def kernel(q, k, v, seen, bias, scale=None, block=4):
    """A Pallas kernel with accumulators in float32; its gradients are not written."""
    batch, heads, length, width = q.shape
    scale = width**-0.5 if scale is None else scale
    one: Any = pl.BlockSpec((1, k.shape[2], width), lambda i, j: (i, 0, 0))
    queries: Any = pl.BlockSpec((1, block, width), lambda i, j: (i, j, 0))
    add: Any = pl.BlockSpec((1, block, k.shape[2]), lambda i, j: (i % heads, j, 0))
    shown: Any = pl.BlockSpec((block, k.shape[2]), lambda i, j: (j, 0))
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    made = pl.pallas_call(
        partial(_kernel, scale=scale),
        out_shape=jax.ShapeDtypeStruct(flat[0].shape, q.dtype),
        grid=(batch * heads, length // block),
        in_specs=[queries, one, one, shown, add],
        out_specs=queries,
        interpret=True,
    )(*flat, seen, bias)
    return made.reshape(q.shape)


def by_hand(q, k, v, seen, bias):
    """Its backward pass written down, from the saved log-sum-exp."""
    return _by_hand(q, k, v, jnp.where(seen, bias, -jnp.inf))


@jax.custom_vjp
def _by_hand(q, k, v, bias):
    return _ahead(q, k, v, bias)[0]


def _scores(q, k, bias):
    return jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5 + bias


def _ahead(q, k, v, bias):
    scores = _scores(q, k, bias)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnts,bnsh->bnth", jnp.exp(scores - lse[..., None]), v)
    return out, (q, k, v, bias, out, lse)


def _back(saved, dout):
    q, k, v, bias, out, lse = saved
    weights = jnp.exp(_scores(q, k, bias) - lse[..., None])
    change = jnp.einsum("bnth,bnsh->bnts", dout, v) - (dout * out).sum(-1, keepdims=True)
    ds = weights * change
    dq = jnp.einsum("bnts,bnsh->bnth", ds, k) * q.shape[-1] ** -0.5
    dk = jnp.einsum("bnts,bnth->bnsh", ds, q) * q.shape[-1] ** -0.5
    return dq, dk, jnp.einsum("bnts,bnth->bnsh", weights, dout), ds.sum(0)


_by_hand.defvjp(_ahead, _back)


def of_jax(q, k, v, seen, bias):
    """`jax.nn.dot_product_attention`, whose softmax is in float32."""
    heads_last = [x.swapaxes(1, 2) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*heads_last, bias[None], seen[None, None]).swapaxes(1, 2)


def inputs(seed: int = 0, batch=2, heads=3, queries=8, keys=10, width=5) -> list[np.ndarray]:
    """Inputs whose sizes all differ; every query sees a key, and each key is hidden from one."""
    drawn = np.random.default_rng(seed)
    q, k, v = (drawn.normal(size=(batch, heads, n, width)) for n in (queries, keys, keys))
    seen = np.tril(np.ones((queries, keys), bool), keys - queries - 1)
    return [q, k, v, seen, drawn.normal(size=(heads, queries, keys))]


def dropped(q, k, v, seen, bias, key, draw=jax.random.bernoulli):
    kept = draw(key, 0.8, (*q.shape[:3], k.shape[2]))
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", jnp.where(kept, weights / 0.8, 0.0), v)


def empty_rows(q, k, v, seen, bias):
    """Zeros for a query that sees nothing."""
    some = seen.any(-1)[:, None]
    return jnp.where(some, formula(q, k, v, seen | ~some, bias), 0)


def step(q, k, v, cache, place):
    """One token against a cache: its result, and the cache with its key and value."""
    keys = lax.dynamic_update_slice_in_dim(cache["k"], k, place, 2)
    values = lax.dynamic_update_slice_in_dim(cache["v"], v, place, 2)
    seen = jnp.arange(keys.shape[2])[None] <= place
    out = formula(q, keys, values, seen, jnp.zeros((1, 1, keys.shape[2]), q.dtype))
    return out, {"k": keys, "v": values}


def cached(seed: int) -> tuple[Any, ...]:
    """One token, a cache of seven places of which four are filled, and the place of the token."""
    drawn = np.random.default_rng(seed)
    token = [drawn.normal(size=(2, 3, 1, 5)) for _ in range(3)]
    cache = {name: drawn.normal(size=(2, 3, 7, 5)) for name in "kv"}
    return (*token, cache, np.int32(4))


def with_empty_row(seed: int) -> tuple[Any, ...]:
    q, k, v, seen, bias = inputs(seed)
    seen[3] = False
    return q, k, v, seen, bias


def with_key(seed: int) -> tuple[Any, ...]:
    return (*inputs(seed), jax.random.key(7))


IN_SHORT_FLOATS = ("float64", "float32", "bfloat16")


def of(
    name: str, function: Callable[..., Any], draw: Callable[..., Any] = inputs, **options: Any
) -> Port:
    """The formula, or a function itself, and that function."""
    first = formula if draw is inputs else function
    made = {"dtypes": ("float64", "float32"), "jit": True, "eager": False, **options}
    drawn = lambda seed: tuple(draw(seed))  # noqa: E731
    return Port(name, lambda: first, lambda rngs: function, drawn, (), made)


PORTS = [
    of("JAX formula", formula),
    of("JAX formula in float32", formula, dtypes=("float32",)),
    of("softmax in float32", single, dtypes=IN_SHORT_FLOATS),
    of("a query at a time", rows),
    of("vmap over heads", each_head),
    of("blocks of keys", online),
    of("Pallas kernel", kernel, dtypes=IN_SHORT_FLOATS, grads=False),
    of("backward pass by hand", by_hand),
    of("jax.nn's attention", of_jax, dtypes=IN_SHORT_FLOATS),
    of("jitted function", jax.jit(each_head)),
    of("JAX dropout", dropped, with_key),
    of("JAX empty rows", empty_rows, with_empty_row),
    of("JAX step", step, cached),
]
