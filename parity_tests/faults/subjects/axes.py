"""Axes in another order: fused projections, heads, groups, merges."""

import jax
import jax.numpy as jnp

from flax_attn.taps import tap

from .. import wrong_pairs as wrong  # noqa: F401
from .attention import attend, f_attend, f_merge, f_qkv, f_split, merge, qkv, split
from .pair import B, D, H, N, T, linear, normal, pair, projections, torch

X = normal("x", B, T, D)
K, G, W = 3, 2, 2  # key heads, query heads to each, and their width, where they are grouped


def fused():
    """Queries, keys and values in one projection, [3, N, H]."""

    def original(m, x):
        q, k, v = (y.transpose(1, 2) for y in m.qkv(x).unflatten(-1, (3, N, H)).unbind(2))
        return m.o(merge(attend(q, k, v)))

    def port(m, x):
        y = m.qkv(x)
        q, k, v = jnp.moveaxis(y.reshape(B, T, 3, N, H), 2, 0)
        return m.o(f_merge(f_attend(q, k, v)))

    parts = {"qkv": linear(D, 3 * N * H), "o": linear(N * H, D)}
    return pair("a fused projection", parts, original, port, (X,), rules=())


def gated():
    """Queries and their gates in one projection, [N, 2 H]."""

    def original(m, x):
        q, gate = m.q(x).unflatten(-1, (N, 2 * H)).chunk(2, dim=-1)
        out = attend(q.transpose(1, 2), split(m.k(x), N), split(m.v(x), N))
        return m.o(merge(out) * torch.sigmoid(gate.flatten(-2)))

    def port(m, x):
        y = m.q(x)
        q, gate = jnp.split(y.reshape(B, T, N, 2 * H), 2, axis=-1)
        out = f_attend(q, f_split(m.k(x), N), f_split(m.v(x), N))
        return m.o(f_merge(out * jax.nn.sigmoid(gate)))

    parts = {**projections(), "q": linear(D, 2 * N * H)}
    return pair("queries and gates in one projection", parts, original, port, (X,))


def keys_and_values():
    """Keys and values in one projection, [2, N, H]."""

    def original(m, x):
        k, v = (y.transpose(1, 2) for y in m.kv(x).unflatten(-1, (2, N, H)).unbind(2))
        return m.o(merge(attend(split(m.q(x), N), k, v)))

    def port(m, x):
        y = m.kv(x)
        k, v = jnp.moveaxis(y.reshape(B, T, 2, N, H), 2, 0)
        return m.o(f_merge(f_attend(f_split(m.q(x), N), k, v)))

    parts = {"q": linear(D, N * H), "kv": linear(D, 2 * N * H), "o": linear(N * H, D)}
    return pair("keys and values in one projection", parts, original, port, (X,))


def plain():
    """Attention without anything, every point of it a tap."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N))))

    def port(m, x):
        q, k, v = (y.reshape(B, T, N, H) for y in (m.q(x), m.k(x), m.v(x)))
        q, k, v = tap("query", q), tap("key", k), tap("value", v)
        scores = tap("scores", jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5)
        weights = tap("weights", jax.nn.softmax(scores))
        out = tap("context", jnp.einsum("bnts,bsnh->btnh", weights, v))
        merged = out.reshape(B, T, N * H)
        return m.o(merged)

    return pair("plain attention", projections(), original, port, (X,), rules=())


def grouped():
    """Each key head for its neighbours among the query heads."""

    def original(m, x):
        q, k, v = qkv(m, x, K * G, kv_heads=K)
        k, v = (y.repeat_interleave(G, 1) for y in (k, v))
        return m.o(merge(attend(q, k, v)))

    def port(m, x):
        q, k, v = f_qkv(m, x, K * G, kv_heads=K)
        q, k, v = q, jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2)
        return m.o(f_merge(f_attend(q, k, v)))

    return pair("grouped heads", projections(n=K * G, k=K, h=W), original, port, (X,))


PORTS = [fused(), gated(), keys_and_values(), plain(), grouped()]
