"""Ports that are hard to see as equal: functions that no two ways compute alike, and odd calls."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, f_scaled, f_scores, merge, qkv
from .pair import B, D, H, N, T, linear, normal, pair, parameter, projections, tokens, torch

X = normal("x", B, T, D)
SHIFT = tokens(B, T, below=5, name="shift")
SIGNS = normal("signs", 2, 700) * 10 ** (4 * np.sin(np.arange(700)))
SEEN = np.tril(np.ones((T, T), bool))
ONE = {"out": linear(D, 9)}


def attention(name, theirs, ours, x=X):
    """What is made of queries, keys and values."""

    def original(m, x):
        return m.o(merge(theirs(*qkv(m, x, N))))

    def port(m, x):
        return m.o(f_merge(ours(*f_qkv(m, x, N))))

    return pair(name, projections(), original, port, (x,))


def sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT / H**0.5 - math.log(T)) @ v


def f_sigmoid(q, k, v):
    weights = jax.nn.sigmoid(f_scaled(q, k) - math.log(T))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def saturated(q, k, v):
    return attend(q, k, v, modify_logits=lambda s: s * 3000)


def f_saturated(q, k, v):
    return f_attend(q, k, v, product=lambda q, k: f_scores(q * 3000, k) / H**0.5)


def hidden(name, fill):
    """Scores hidden by a number, of which nothing shows behind the softmax."""

    def original(q, k, v):
        unseen = ~torch.from_numpy(SEEN)
        return attend(q, k, v, modify_logits=lambda s: s.masked_fill(unseen, fill))

    def port(q, k, v):
        return f_attend(q, k, v, modify_logits=lambda s: jnp.where(jnp.asarray(SEEN), s, fill))

    return attention(name, original, port)


def of_gain(name, theirs, ours, x=X, far=0.0, width=D):
    """What is made of the input times a gain and `far` from zero."""

    def original(m, x):
        return theirs(m.gain * x + far)

    def port(m, x):
        return ours(m.gain[...] * x + far)

    return pair(name, {"gain": parameter(width)}, original, port, (x,))


def two_pass(y):
    return y.var(-1, correction=0)


def moments(y):
    return (y**2).mean(-1) - y.mean(-1) ** 2


def f_two_pass(y):
    return ((y - y.mean(-1, keepdims=True)) ** 2).mean(-1)


def f_moments(y):
    return jnp.mean(y**2, axis=-1) - jnp.mean(y, axis=-1) ** 2


def f_shifted(y):
    gap = y - y[..., :1]
    return (gap**2).mean(-1) - gap.mean(-1) ** 2


def f_sums(y):
    """Sums step by step."""
    first = jnp.zeros_like(y[:, 0])
    _, out = jax.lax.scan(lambda total, row: (total + row,) * 2, first, y.T)
    return out.T


def tiny():
    """RMS of vectors of 1e-90, whose squares are no numbers of float32."""

    def original(m, x):
        y = m.out(x) * 1e-90
        return y / y.pow(2).mean(-1, keepdim=True).sqrt()

    def port(m, x):
        y = m.out(x) * 1e-90
        return y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True))

    return pair("a norm of tiny vectors", ONE, original, port, (X,))


def indices():
    """Indices, which are narrower where x64 is off, and ids of 32 bits that come in."""

    def run(m, x, shift):
        y = m.out(x)
        return {"y": y, "best": y.argmax(-1), "moved": y.argmax(-1) + shift}

    options = {"dtypes": ("float64", "float32"), "jit": True, "eager": False}
    return pair("indices where x64 is off", ONE, run, run, (X, SHIFT), options)


def beside():
    """Zeros and a row of -inf beside an output that shows something."""

    def original(m, x):
        y = m.out(x)
        return {"y": y, "loss": y.new_zeros(()), "hidden": torch.full_like(y, -torch.inf)}

    def port(m, x):
        y = m.out(x)
        return {"y": y, "loss": jnp.zeros((), y.dtype), "hidden": jnp.full_like(y, -jnp.inf)}

    return pair("zeros and -inf beside an output", ONE, original, port, (X,))


PORTS = [
    attention("sigmoid attention", sigmoid, f_sigmoid),
    attention("a softmax saturated by scores of ten thousand", saturated, f_saturated),
    attention("one token alone", attend, f_attend, X[:, :1]),
    hidden("attention hidden by finfo.min", torch.finfo(torch.float64).min),
    hidden("attention hidden by -inf", -np.inf),
    of_gain("the variance by moments far from zero", two_pass, f_moments),
    of_gain("torch's variance by moments, cancelled", moments, f_two_pass, far=2000.0),
    of_gain("both variances by moments, cancelled", moments, f_shifted, far=300.0),
    of_gain("a long sum step by step", lambda y: y.cumsum(1), f_sums, SIGNS, width=1),
    tiny(),
    indices(),
    beside(),
]
