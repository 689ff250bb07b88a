"""A causal attention with a cache in both worlds; in Flax each method is a place for a fault."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn.taps import tap

N, H, D = 2, 4, 6  # heads, their width, the model's width
FREQUENCIES = np.array([1.0, 0.1])


class Theirs(torch.nn.Module):
    """Rotary attention to a window of so many tokens; a token that is not valid is not there."""

    def __init__(self, window: int = 99):
        super().__init__()
        self.window = window
        names = {"q": (D, N * H), "k": (D, N * H), "v": (D, N * H), "o": (N * H, D)}
        for name, sizes in names.items():
            setattr(self, name, torch.nn.Linear(*sizes, bias=False))

    def forward(self, x, valid=None):
        return self.step(x, valid)[0]

    def step(self, x, valid=None, cache=None):
        """The rows of a piece; the cache holds all keys, values and positions so far."""
        valid = torch.ones(x.shape[:2], dtype=torch.bool) if valid is None else valid
        before = 0 if cache is None else cache[2].max(-1, keepdim=True).values + 1
        places = torch.where(valid, before + valid.cumsum(-1) - 1, -1)  # B T
        q, k, v = (self.heads(name, x) for name in "qkv")  # B N T H
        q, k = self.turned(q, places), self.turned(k, places)
        if cache is not None:
            k, v = (torch.cat([old, new], 2) for old, new in zip(cache, (k, v), strict=False))
        kept = places if cache is None else torch.cat([cache[2], places], 1)  # B S
        distance = places[:, None, :, None] - kept[:, None, None]
        seen = (distance >= 0) & (distance < self.window) & (kept >= 0)[:, None, None]
        scores = (q @ k.mT / H**0.5).masked_fill(~seen, float("-inf"))
        weights = torch.nan_to_num(scores.softmax(-1)) * valid[:, None, :, None]
        out = (weights @ v).transpose(1, 2).flatten(2)  # B T D
        return self.o(out), (k, v, kept)

    def heads(self, name, x):
        return getattr(self, name)(x).unflatten(-1, (N, H)).transpose(1, 2)

    def turned(self, x, places):
        angles = places[:, None, :, None] * torch.as_tensor(FREQUENCIES, dtype=x.dtype)
        (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What is stored."""

    keys: jax.Array  # B S N H
    values: jax.Array
    places: jax.Array  # B S, -1 where nothing is stored
    length: jax.Array  # B


class Mine(nnx.Module):
    """The same, with a cache of S slots: a ring if there are more tokens than that."""

    def __init__(self, window: int = 99, ring: int | None = None):
        rngs, self.window, self.ring = nnx.Rngs(0), window, ring
        sizes = {"q": (D, N * H), "k": (D, N * H), "v": (D, N * H), "o": (N * H, D)}
        for name, (inside, outside) in sizes.items():
            linear = nnx.Linear(inside, outside, use_bias=False, rngs=rngs)
            setattr(self, name, linear)

    def init_cache(self, batch: int, length: int) -> Cache:
        size = self.ring or length
        kept = jnp.zeros((batch, size, N, H), self.q.kernel.get_value().dtype)
        places = jnp.full((batch, size), -1)
        return Cache(kept, kept, places, jnp.zeros(batch, places.dtype))

    def __call__(self, x, valid=None, cache=None):
        valid = jnp.ones(x.shape[:2], bool) if valid is None else valid
        before = jnp.zeros((x.shape[0], 1), int) if cache is None else cache.length[:, None]
        places = jnp.where(valid, before + jnp.cumsum(valid, -1) - 1, -1)  # B T
        q, k, v = (getattr(self, name)(x).reshape(*x.shape[:2], N, H) for name in "qkv")
        if cache is None:
            q, k = tap("query", turned(q, places)), tap("key", turned(k, places))
            return self.attend(q, k, tap("value", v), places, places, valid)
        size = cache.keys.shape[1]
        q = turned(q, self.query_places(places, cache))
        k = turned(k, self.key_places(places, cache))
        slots = self.slots(places, valid, size, cache)
        new = self.written(cache, k, v, places, slots)
        new = replace(new, length=self.length(cache, valid))
        seen = self.read(cache, Cache(k, v, places, new.length), new)
        return self.attend(q, seen.keys, seen.values, places, seen.places, valid), new

    def attend(self, q, k, v, places, kept, valid):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
        seen = self.seen(places[:, None, :, None], kept[:, None, None])
        scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.where(seen.any(-1, keepdims=True), scores.max(-1, keepdims=True), 0.0)
        weights = jnp.exp(scores - top)
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-300)
        out = jnp.einsum("bnts,bsnh->btnh", weights * valid[:, None, :, None], v)
        return self.o(out.reshape(*out.shape[:2], N * H))

    def seen(self, query, key):
        return (key >= 0) & (key <= query) & (query - key < self.window)

    def query_places(self, places, cache):
        return places

    def key_places(self, places, cache):
        return places

    def slots(self, places, valid, size, cache):
        """Where tokens are written; beyond the last slot is nowhere."""
        last = places.max(-1, keepdims=True)
        return jnp.where(valid & (places > last - size), places % size, size)

    def written(self, cache, k, v, places, slots):
        return Cache(
            put(cache.keys, k, slots),
            put(cache.values, v, slots),
            put(cache.places, places, slots),
            cache.length,
        )

    def length(self, cache, valid):
        return cache.length + valid.sum(-1)

    def read(self, old, new, written):
        """What a step attends to: what was stored before it, and itself."""
        keys, values, places = (
            jnp.concatenate([getattr(old, name), getattr(new, name)], 1)
            for name in ("keys", "values", "places")
        )
        return Cache(keys, values, places, old.length)

    def truncate(self, cache, length):
        kept = cache.places < length[:, None]
        return replace(cache, places=jnp.where(kept, cache.places, -1), length=length)

    def take(self, cache, rows):
        return jax.tree.map(lambda x: x[rows], cache)


def turned(x, places):
    angles = places[..., None, None] * jnp.asarray(FREQUENCIES, x.dtype).reshape(1, 1, 1, 2)
    (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def put(old, new, slots):
    rows = jnp.arange(old.shape[0])[:, None]
    return old.at[rows, slots].set(new.astype(old.dtype), mode="drop")
