"""The trial's port, faithful, every step of it a part that a fault can take the place of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.taps import tap

from .sizes import BASE, CAP, LAYER_EPS, RATE, RMS_EPS, Sizes


def linear(x, kernel, bias):
    return x @ kernel + bias


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + LAYER_EPS) * scale + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + RMS_EPS) * scale


def embed(ids, table):
    return table[ids]


def split(y, heads):
    return y.reshape(*y.shape[:-1], heads, -1)  # B T N h


def turn(x, angle):
    """Halves of B T N h turned by angles of (B) T h/2."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def angles(positions, width, dtype):
    half = width // 2
    return positions[..., None].astype(dtype) * BASE ** (-jnp.arange(half, dtype=dtype) / half)


def rotate(x, positions):
    return turn(x, angles(positions, x.shape[-1], x.dtype))


def repeat(x, times):
    return jnp.repeat(x, times, axis=2)


def product(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def scale(scores, z):
    return scores / z.h**0.5


def softcap(scores):
    return CAP * jnp.tanh(scores / CAP)


def slopes(heads, dtype):
    return 2.0 ** (-8.0 * jnp.arange(1, heads + 1, dtype=dtype) / heads)


def distance(z):
    return jnp.arange(z.M, z.S)[:, None] - jnp.arange(z.S)  # T S


def alibi(scores, z):
    return scores - slopes(z.N, scores.dtype)[:, None, None] * distance(z).astype(scores.dtype)


def mask(there, z):
    return (distance(z) >= 0) & there[:, None, None]  # B 1 T S


def hide(scores, visible):
    return jnp.where(visible, scores, -jnp.inf)


def softmax(scores):
    raised = jnp.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def mix(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def merge(y):
    return y.reshape(*y.shape[:-2], -1)


def act(x):
    return jax.nn.gelu(x, approximate=False)


def same(x):
    return x


def add(x, y):
    return x + y


def second(x, y):
    return y


@dataclass(frozen=True)
class Parts:
    """What the port is made of; a fault replaces one of them."""

    linear: Callable = linear
    layer_norm: Callable = layer_norm
    rms_norm: Callable = rms_norm
    embed: Callable = embed
    split_q: Callable = split
    split_k: Callable = split
    split_v: Callable = split
    rotate_q: Callable = rotate
    rotate_k: Callable = rotate
    rows: Callable = same
    columns: Callable = same
    repeat_k: Callable = repeat
    repeat_v: Callable = repeat
    product: Callable = product
    scale: Callable = scale
    softcap: Callable = softcap
    alibi: Callable = alibi
    mask: Callable = mask
    hide: Callable = hide
    softmax: Callable = softmax
    drop_in: Callable = same
    drop: Callable = lambda dropout, weights: dropout(weights)
    dropped: Callable = same
    mix: Callable = mix
    merge: Callable = merge
    act: Callable = act
    skip1: Callable = add
    norm2_in: Callable = second
    skip2: Callable = add
    head_in: Callable = second
    logits: Callable = same
    outputs: Callable = same
    # of the step with a ring of keys and values
    slot: Callable = lambda before, z: before % z.S
    write_k: Callable = lambda here, new, cache: jnp.where(here, new, cache)
    write_v: Callable = lambda here, new, cache: jnp.where(here, new, cache)
    read_k: Callable = second
    read_v: Callable = second
    written: Callable = lambda before, z: jnp.arange(z.S) <= before[:, None]
    statistics: Callable = lambda old, mean, var, n: (
        0.9 * old[0] + 0.1 * mean,
        0.9 * old[1] + 0.1 * var * n / (n - 1),
    )


RIGHT = Parts()


class Linear(nnx.Linear):
    parts = RIGHT

    def __call__(self, x):
        return self.parts.linear(x, self.kernel[...], self.bias[...])


class LayerNorm(nnx.LayerNorm):
    parts = RIGHT

    def __call__(self, x):
        return self.parts.layer_norm(x, self.scale[...], self.bias[...])


class RMSNorm(nnx.RMSNorm):
    parts = RIGHT

    def __call__(self, x):
        return self.parts.rms_norm(x, self.scale[...])


class Embed(nnx.Embed):
    parts = RIGHT

    def __call__(self, ids):
        return self.parts.embed(ids, self.embedding[...])


class Attention(nnx.Module):
    parts = RIGHT

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.z = z
        self.q_proj = Linear(z.D, z.N * z.h, rngs=rngs)
        self.k_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.v_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.o_proj = Linear(z.N * z.h, z.D, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x, memory, there):
        p, z = self.parts, self.z
        all_keys = jnp.concatenate([memory, x], axis=1)  # B S D
        q = p.split_q(self.q_proj(x), z.N)  # B T N h
        k = p.split_k(self.k_proj(all_keys), z.K)  # B S K h
        v = p.split_v(self.v_proj(all_keys), z.K)  # B S K h
        q = tap("query", p.rotate_q(q, p.rows(jnp.arange(z.M, z.S))))
        k = tap("key", p.repeat_k(p.rotate_k(k, p.columns(jnp.arange(z.S))), z.G))  # B S N h
        scores = p.alibi(p.softcap(p.scale(p.product(q, k), z)), z)  # B N T S
        scores = tap("scores", p.hide(scores, p.mask(there, z)))
        weights = tap("weights", p.softmax(p.drop_in(scores)))
        weights = p.dropped(p.drop(self.dropout, weights))
        v = tap("value", p.repeat_v(v, z.G))  # B S N h
        mixed = tap("context", p.mix(weights, v))  # B T N h
        return self.o_proj(p.merge(mixed))


class MLP(nnx.Module):
    parts = RIGHT

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.up, self.down = Linear(z.D, z.F, rngs=rngs), Linear(z.F, z.D, rngs=rngs)

    def __call__(self, x):
        return self.down(tap("act", self.parts.act(self.up(x))))


class Layer(nnx.Module):
    parts = RIGHT

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.norm1, self.attn = LayerNorm(z.D, epsilon=LAYER_EPS, rngs=rngs), Attention(z, rngs)
        self.norm2, self.mlp = RMSNorm(z.D, epsilon=RMS_EPS, rngs=rngs), MLP(z, rngs)

    def __call__(self, x, memory, there):
        p = self.parts
        y = p.skip1(x, self.attn(self.norm1(x), memory, there))
        return p.skip2(y, self.mlp(self.norm2(p.norm2_in(x, y))))


class Model(nnx.Module):
    parts = RIGHT

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.embed = Embed(z.V, z.D, rngs=rngs)
        self.layers = nnx.List([Layer(z, rngs) for _ in range(z.L)])
        self.norm = LayerNorm(z.D, epsilon=LAYER_EPS, rngs=rngs)
        self.head = Linear(z.D, z.V, rngs=rngs)

    def __call__(self, tokens, memory, there):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, memory, there)
        logits = self.parts.logits(self.head(self.parts.head_in(x, self.norm(x))))
        return self.parts.outputs({"logits": logits, "best": logits.argmax(-1)})


class Step(nnx.Module):
    parts = RIGHT

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.z = z
        self.q_proj = Linear(z.D, z.N * z.h, rngs=rngs)
        self.k_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.v_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.o_proj = Linear(z.N * z.h, z.D, rngs=rngs)

    def __call__(self, x, cache_k, cache_v, before):
        p, z = self.parts, self.z
        q = p.rotate_q(p.split_q(self.q_proj(x), z.N), p.rows(before[:, None]))  # B 1 N h
        k = p.rotate_k(p.split_k(self.k_proj(x), z.K), p.columns(before[:, None]))  # B 1 K h
        v = p.split_v(self.v_proj(x), z.K)  # B 1 K h
        here = (jnp.arange(z.S) == p.slot(before, z)[:, None])[..., None, None]  # B S 1 1
        new_k, new_v = p.write_k(here, k, cache_k), p.write_v(here, v, cache_v)  # B S K h
        q = tap("query", q)
        keys = tap("key", p.repeat_k(p.read_k(cache_k, new_k), z.G))  # B S N h
        scores = p.scale(p.product(q, keys), z)  # B N 1 S
        scores = tap("scores", p.hide(scores, p.written(before, z)[:, None, None]))
        weights = tap("weights", p.softmax(scores))
        values = tap("value", p.repeat_v(p.read_v(cache_v, new_v), z.G))  # B S N h
        out = self.o_proj(p.merge(tap("context", p.mix(weights, values))))
        return p.outputs({"out": out, "cache_k": new_k, "cache_v": new_v, "before": before + 1})


class BatchNorm(nnx.BatchNorm):
    """With torch's running variance, which divides by n - 1; nnx's own divides by n."""

    parts = RIGHT

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean, var = x.mean(0), x.var(0)
            old = (self.mean[...], self.var[...])
            self.mean[...], self.var[...] = self.parts.statistics(old, mean, var, x.shape[0])
        return (x - mean) * jax.lax.rsqrt(var + self.epsilon) * self.scale[...] + self.bias[...]


class Statistics(nnx.Module):
    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.norm = BatchNorm(z.D, momentum=0.9, epsilon=LAYER_EPS, rngs=rngs)
        self.out = Linear(z.D, z.V, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))
