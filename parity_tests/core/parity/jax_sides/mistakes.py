"""Mistakes in JAX attention, each beside the function that is right."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .attentions import formula, inputs, kernel

Function = Callable[..., Any]


class Mistake(NamedTuple):
    """A right function, a wrong one, their inputs, and where the judge must see it.

    `kinds` are the kinds of rows of which one must fail, `dtypes` those in which it shows.
    """

    right: Function
    wrong: Function
    inputs: list[Any]
    dtypes: tuple[str, ...] = ("float64",)
    kinds: tuple[str, ...] = ("output",)
    grads: bool = True


def softmax(q, k, v, seen, bias, axis=-1, mix=jnp.einsum):
    scores = mix("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=axis)
    return mix("bnts,bnsh->bnth", jnp.where(seen, weights, 0.0), v)


def wrong_axis(q, k, v, seen, bias):
    return softmax(q, k, v, seen, bias, axis=-2)


def tensor_float(q, k, v, seen, bias):
    """Products of operands with the ten bits of TensorFloat-32."""

    def mix(subscripts, *operands):
        short = (lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in operands)
        return jnp.einsum(subscripts, *short)

    return softmax(q, k, v, seen, bias, mix=mix)


def asked_low(q, k, v, seen, bias):
    """Products at a precision that only an accelerator makes use of."""
    low = lambda *x: jnp.einsum(*x, precision=lax.Precision.DEFAULT)  # noqa: E731
    return softmax(q, k, v, seen, bias, mix=low)


def dropped_row(q, k, v, seen, bias):
    return formula(q, k, v, jnp.asarray(seen).at[5].set(True), bias)


def detached(q, k, v, seen, bias):
    return formula(q, lax.stop_gradient(k), v, seen, bias)


def zeros(q, k, v, seen, bias):
    return 0.0 * formula(q, k, v, seen, bias)


def scaled(q, k, v, seen, bias):
    return formula(q * 1.0001, k, v, seen, bias)


def wrong_kernel(q, k, v, seen, bias):
    return kernel(q, k, v, seen, bias, scale=1 / q.shape[-1])


def short_sums(q, k, v, seen, bias):
    """Sums of the softmax and of the products in bfloat16."""
    narrow = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    return softmax(*narrow, seen, bias.astype(jnp.bfloat16)).astype(q.dtype)


def hidden_nan(q, k, v, seen, bias):
    """A query that sees nothing: zeros are asked for."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", weights, v)


def empty_rows(q, k, v, seen, bias):
    return jnp.where(
        seen.any(-1)[:, None], softmax(q, k, v, seen | ~seen.any(-1)[:, None], bias), 0
    )


def keep(key, shape):
    return jax.random.bernoulli(key, 0.8, shape)


def dropped(q, k, v, seen, bias, key, other=False, keep=keep):
    kept = keep(key, (*q.shape[:3], k.shape[2]))
    if other:
        kept = kept.at[1, 2, 3, 1].set(~kept[1, 2, 3, 1])
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", jnp.where(kept, weights / 0.8, 0.0), v)


def one_bit(q, k, v, seen, bias, key):
    return dropped(q, k, v, seen, bias, key, other=True)


def transposed_heads(q, k, v, seen, bias):
    out = formula(q, k, v, seen, bias)
    return out.swapaxes(1, 2).reshape(out.shape)


def off_by_one(q, k, v, seen, bias):
    return formula(q, k, v, jnp.roll(seen, 1, axis=1), bias)


def step(q, k, v, cache, place):
    """One token against a cache: its result, and the cache with its key and value."""
    keys = lax.dynamic_update_slice_in_dim(cache["k"], k, place, 2)
    values = lax.dynamic_update_slice_in_dim(cache["v"], v, place, 2)
    seen = jnp.arange(keys.shape[2])[None] <= place
    out = formula(q, keys, values, seen, jnp.zeros((1, 1, keys.shape[2]), q.dtype))
    return out, {"k": keys, "v": values}


def stale(q, k, v, cache, place):
    """Right at once, but the new value never reaches the cache that it returns."""
    out, kept = step(q, k, v, cache, place)
    return out, {"k": kept["k"], "v": cache["v"]}


def read_before(q, k, v, cache, place):
    """Reads the cache before the token is written."""
    _, kept = step(q, k, v, cache, place)
    out, _ = step(q, cache["k"][:, :, 4:5], cache["v"][:, :, 4:5], cache, place)
    return out, kept


def cached(seed=0):
    """One token, a cache of seven places of which four are filled, and the place of the token."""
    drawn = np.random.default_rng(seed)
    token = [drawn.normal(size=(2, 3, 1, 5)) for _ in range(3)]
    cache = {name: drawn.normal(size=(2, 3, 7, 5)) for name in "kv"}
    return [*token, cache, np.int32(4)]


def with_empty_row():
    q, k, v, seen, bias = inputs()
    seen[3] = False
    return [q, k, v, seen, bias]


X = inputs()
MISTAKES = {
    "a wrong axis": Mistake(softmax, wrong_axis, X),
    "TF32 in place of float32": Mistake(formula, tensor_float, X, ("float32",)),
    "a precision below the first's": Mistake(formula, asked_low, X, ("float32",), ("exact",)),
    "a dropped mask row": Mistake(formula, dropped_row, X),
    "a detached gradient": Mistake(formula, detached, X, kinds=("gradient",)),
    "zeros": Mistake(formula, zeros, X),
    "a scale": Mistake(formula, scaled, X),
    "a scale inside a kernel": Mistake(formula, wrong_kernel, X, grads=False),
    "sums in bfloat16": Mistake(formula, short_sums, X, ("float32",)),
    "NaN in hidden rows": Mistake(empty_rows, hidden_nan, with_empty_row()),
    "one bit of dropout": Mistake(dropped, one_bit, [*X, jax.random.key(7)]),
    "transposed heads": Mistake(formula, transposed_heads, X),
    "off by one": Mistake(formula, off_by_one, X),
    "a stale cache": Mistake(step, stale, cached()),
    "a cache read too early": Mistake(step, read_before, cached()),
}
