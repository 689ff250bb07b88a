"""Originals that call `scaled_dot_product_attention`, whose softmax no hook sees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .. import wrong_pairs as wrong  # noqa: F401
from .attention import F, f_attend, f_merge, f_qkv, f_scores, merge, qkv
from .pair import B, D, H, N, S, T, normal, pair, parameter, projections, torch

X, MEMORY = normal("x", B, T, D), normal("memory", B, S, D)
BIAS = normal("bias", N, T, S)
ROWS, COLUMNS = np.arange(T)[:, None], np.arange(S)
THERE = np.ones((B, 1, 1, S), bool)
THERE[0, ..., -2:], THERE[1, ..., 1] = False, False
CAUSAL = ROWS >= COLUMNS
WINDOW = (COLUMNS <= ROWS + 2) & (COLUMNS > ROWS + 2 - 3)
EMPTY = (COLUMNS <= ROWS + 2) & (ROWS != 1)  # the second row sees nothing
LEAST = np.where(EMPTY, 0.0, float(np.finfo(np.float64).min))
WIDE, HEADS, KEYS = 9, 6, 3


def sdpa(given):
    """Torch's call with these arguments, arrays as tensors; floating ones in the query's dtype."""

    def call(m, q, k, v):
        named = {}
        for name, x in given.items():
            x = x(m) if callable(x) else x
            x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
            named[name] = x.to(q.dtype) if torch.is_tensor(x) and x.is_floating_point() else x
        return F.scaled_dot_product_attention(q, k, v, **named)

    return call


def unchanged(m, s):
    return s


def crossed(name, given, change=unchanged, softmax=jax.nn.softmax, scale=H**-0.5, **more):
    """Attention to a memory: what torch's call is given, what Flax does to the scores."""
    call, parts = sdpa(given), {**projections(), **more.pop("parts", {})}

    def original(m, x, memory):
        return m.o(merge(call(m, *qkv(m, x, N, memory))))

    def port(m, x, memory):
        q, k, v = f_qkv(m, x, N, memory)
        attended = partial(
            f_attend,
            modify_logits=lambda s: change(m, s),
            product=lambda q, k: f_scores(q, k) * scale,
            softmax=softmax,
        )
        return m.o(f_merge(attended(q, k, v)))

    return pair(name, parts, original, port, (X, MEMORY), more)


def shown(name, seen, softmax=jax.nn.softmax, **given):
    """With scores hidden where not `seen`."""

    def hidden(m, s):
        return jnp.where(jnp.asarray(seen), s, -jnp.inf)

    return crossed(name, given, hidden, softmax)


def biased(m, s):
    return s + jnp.asarray(BIAS, s.dtype)


def capped(m, s):
    return s + 2 * jnp.tanh(m.bias[...] / 2)


def lowered(m, s):
    return s + jnp.asarray(LEAST, s.dtype)


def average(s):
    """Rows without a visible key give the average."""
    return jax.nn.softmax(s)


def zeros(s):
    """Rows without a visible key give zeros."""
    most = jnp.max(s, axis=-1, keepdims=True)
    raised = jnp.exp(s - jnp.where(jnp.isfinite(most), most, 0.0))
    total = raised.sum(-1, keepdims=True)
    return raised / jnp.where(total == 0, 1.0, total)


def sinks():
    """A sink for each head: one more key, whose score is learnt and whose value is zero."""

    def original(m, x, memory):
        q, k, v = qkv(m, x, N, memory)
        k, v = (F.pad(y, (0, 0, 0, 1)) for y in (k, v))
        bias = F.pad(q.new_zeros(B, N, T, S), (0, 1)) + F.pad(m.sinks[:, None, None], (S, 0))
        return m.o(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))

    def port(m, x, memory):
        def softmax(s):
            last = jnp.broadcast_to(m.sinks[...][:, None, None], (*s.shape[:-1], 1))
            return jax.nn.softmax(jnp.concatenate([s, last], -1))[..., :-1]

        return m.o(f_merge(f_attend(*f_qkv(m, x, N, memory), softmax=softmax)))

    parts = {**projections(), "sinks": parameter(N)}
    return pair("a fused call with sinks", parts, original, port, (X, MEMORY))


def grouped():
    """Torch repeats each key head for its neighbours."""

    def original(m, x, memory):
        q, k, v = qkv(m, x, HEADS, memory, KEYS)
        return m.o(merge(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))

    def port(m, x, memory):
        q, k, v = f_qkv(m, x, HEADS, memory, KEYS)
        k, v = (jnp.repeat(y, HEADS // KEYS, axis=2) for y in (k, v))
        return m.o(f_merge(f_attend(q, k, v)))

    parts = projections(n=HEADS, k=KEYS, h=2)
    return pair("a fused call of grouped heads", parts, original, port, (X, MEMORY))


PORTS = [
    crossed("a fused call", {}),
    crossed("a fused call with a scale", {"scale": 0.3}, scale=0.3),
    crossed("a fused call of wide values", {}, parts=projections(wide=WIDE)),
    crossed("a fused call with a bias", {"attn_mask": BIAS}, biased),
    crossed(
        "a fused call with a capped bias",
        {"attn_mask": lambda m: 2 * torch.tanh(m.bias / 2)},
        capped,
        parts={"bias": parameter(N, T, S)},
    ),
    shown("a fused causal call", CAUSAL, is_causal=True),
    shown("a fused call with a window", WINDOW, attn_mask=WINDOW),
    shown("a fused call with a mask", THERE, attn_mask=THERE),
    shown("a fused call with an added mask", THERE, attn_mask=np.where(THERE, 0.0, -np.inf)),
    shown("a fused call with an empty row", EMPTY, zeros, attn_mask=EMPTY),
    crossed(
        "a fused call with a row of the lowest number",
        {"attn_mask": LEAST},
        lowered,
        average,
        grads=False,  # torch's own are wrong by the number of keys in such a row
    ),
    sinks(),
    grouped(),
]
