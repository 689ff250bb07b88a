"""One attention with options, in torch and in Flax, for pairs that differ in one of them."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn.taps import tap

B, T, N, K, H, D = 2, 7, 4, 2, 6, 18


@dataclass(frozen=True)
class Options:
    """What a side does; the other's may differ in one.

    Attributes:
      order: of a fused projection's axes, "3 n h" say; "" for three projections.
      kv_heads: how many heads keys and values have.
      tiled: whether keys and values are tiled to the queries' heads, not repeated.
      gate: whether queries come with a gate, and in which order of axes.
      base: of rotary angles; 0 for none.
      narrow: what of the angles is computed in float32: "", "frequencies", "tables".
      width: how many components are turned.
      back, ahead: how far a query sees.
      fill: of the mask.
      also: a query and a key that it sees besides, or ().
      times: what the speeds of rotary angles are multiplied with.
      flip: whether queries have their components in reversed order.
      empty: whether one row sees nothing, and gives: "", "average", "zeros", "first".
      scale: what the product of query and key is multiplied with.
      fused: whether torch calls its own attention.
      taps: whether Flax taps query, key, value, scores, weights, context.
    """

    order: str = ""
    kv_heads: int = N
    tiled: bool = False
    gate: str = ""
    base: float = 0.0
    narrow: str = ""
    width: int = H
    back: int = T
    ahead: int = 0
    also: tuple[int, ...] = ()
    times: float = 1.0
    flip: bool = False
    empty: str = ""
    scale: float = H**-0.5
    fused: bool = False
    taps: bool = True

    def seen(self) -> np.ndarray:
        """Which keys each query sees; with `empty`, query 3 sees none."""
        distance = np.arange(T)[:, None] - np.arange(T)
        seen = (distance <= self.back) & (distance >= -self.ahead)
        if self.also:
            seen[self.also] = True
        return seen & (np.arange(T) != 3)[:, None] if self.empty else seen

    def tables(self, dtype: type) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, T by half the width, with what is narrow rounded."""
        half = self.width // 2
        speed = self.times * self.base ** (-np.arange(half) / half)
        speed = speed.astype(np.float32) if self.narrow == "frequencies" else speed
        angle = np.arange(T)[:, None] * speed.astype(np.float64)
        cos, sin = np.cos(angle), np.sin(angle)
        if self.narrow == "tables":
            cos, sin = cos.astype(np.float32), sin.astype(np.float32)
        return cos.astype(dtype), sin.astype(dtype)


def cut(y, order, parts, swap):
    """`B T C` as `parts` arrays of B N T H."""
    if not order:
        return tuple(swap(x.reshape(*x.shape[:-1], -1, H)) for x in y)
    sizes = {str(parts): parts, "n": N, "h": H}
    axes = order.split()
    y = y.reshape(B, T, *(sizes[axis] for axis in axes))
    at = 2 + axes.index(str(parts))
    found = []
    for part in range(parts):
        x = y[(slice(None),) * at + (part,)]
        rest = [axis for axis in axes if axis != str(parts)]
        x = x if rest == ["n", "h"] else x.swapaxes(2, 3)
        found.append(swap(x))
    return tuple(found)


class Theirs(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.o = options
        if options.order:
            self.qkv = torch.nn.Linear(D, 3 * N * H)
        else:
            self.q = torch.nn.Linear(D, (2 if options.gate else 1) * N * H)
            self.k = torch.nn.Linear(D, options.kv_heads * H)
            self.v = torch.nn.Linear(D, options.kv_heads * H)
        self.out = torch.nn.Linear(N * H, D)

    def split(self, x):
        o = self.o
        if o.order:
            return (*cut(self.qkv(x), o.order, 3, lambda y: y.transpose(1, 2)), None)
        if not o.gate:
            found = cut((self.q(x), self.k(x), self.v(x)), "", 3, lambda y: y.transpose(1, 2))
            return (*found, None)
        q, gate = cut(self.q(x), o.gate, 2, lambda y: y.transpose(1, 2))
        k, v = cut((self.k(x), self.v(x)), "", 2, lambda y: y.transpose(1, 2))
        return q, k, v, gate

    def turn(self, x):
        if not self.o.base:
            return x
        cos, sin = (torch.tensor(y).to(x.dtype) for y in self.o.tables(np.float64))
        half = self.o.width // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def shared(self, x):
        group = N // self.o.kv_heads
        return x.repeat(1, group, 1, 1) if self.o.tiled else x.repeat_interleave(group, 1)

    def forward(self, x):
        o = self.o
        q, k, v, gate = self.split(x)
        q, k, v = self.turn(q), self.shared(self.turn(k)), self.shared(v)
        seen = torch.tensor(o.seen())
        if o.fused:
            mask = seen if not o.empty else (~seen) * torch.finfo(x.dtype).min
            mixed = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=o.scale
            )
        else:
            scores = q @ k.mT * o.scale
            fill = torch.finfo(x.dtype).min if o.empty == "average" else -torch.inf
            weights = torch.softmax(scores.masked_fill(~seen, fill), -1)
            if o.empty == "zeros":
                weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
            mixed = weights @ v
        mixed = mixed if gate is None else mixed * gate.sigmoid()
        return self.out(mixed.transpose(1, 2).reshape(B, T, N * H))


class Ours(nnx.Module):
    def __init__(self, options):
        rngs, o = nnx.Rngs(0), options
        self.o = o
        if o.order:
            self.qkv = nnx.Linear(D, 3 * N * H, rngs=rngs)
        else:
            self.q = nnx.Linear(D, (2 if o.gate else 1) * N * H, rngs=rngs)
            self.k = nnx.Linear(D, o.kv_heads * H, rngs=rngs)
            self.v = nnx.Linear(D, o.kv_heads * H, rngs=rngs)
        self.out = nnx.Linear(N * H, D, rngs=rngs)

    def split(self, x):
        o = self.o
        if o.order:
            return (*cut(self.qkv(x), o.order, 3, lambda y: y.swapaxes(1, 2)), None)
        if not o.gate:
            found = cut((self.q(x), self.k(x), self.v(x)), "", 3, lambda y: y.swapaxes(1, 2))
            return (*found, None)
        q, gate = cut(self.q(x), o.gate, 2, lambda y: y.swapaxes(1, 2))
        k, v = cut((self.k(x), self.v(x)), "", 2, lambda y: y.swapaxes(1, 2))
        return q, k, v, gate

    def turn(self, x):
        if not self.o.base:
            return x
        cos, sin = (jnp.asarray(y)[None, None] for y in self.o.tables(x.dtype))
        half = self.o.width // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def shared(self, x):
        group = N // self.o.kv_heads
        return jnp.tile(x, (1, group, 1, 1)) if self.o.tiled else jnp.repeat(x, group, 1)

    def note(self, name, x):
        if not self.o.taps:
            return x
        turned = name in ("query", "key", "value", "context")
        x = x.swapaxes(1, 2) if turned else x
        x = tap(name, x)
        return x.swapaxes(1, 2) if turned else x

    def __call__(self, x):
        o = self.o
        q, k, v, gate = self.split(x)
        q, k, v = self.turn(q), self.shared(self.turn(k)), self.shared(v)
        q = q[..., ::-1] if o.flip else q
        q, k, v = self.note("query", q), self.note("key", k), self.note("value", v)
        scores = q @ k.mT * o.scale
        seen = jnp.asarray(o.seen())[None, None]
        fill = jnp.finfo(x.dtype).min if o.empty == "average" else -jnp.inf
        if o.empty == "first":
            seen = seen.at[..., 3, 0].set(True)
        scores = self.note("scores", jnp.where(seen, scores, fill))
        weights = jax.nn.softmax(scores)
        weights = self.note("weights", jnp.where(jnp.isnan(weights), 0.0, weights))
        mixed = self.note("context", weights @ v)
        mixed = mixed if gate is None else mixed * jax.nn.sigmoid(gate)
        return self.out(mixed.swapaxes(1, 2).reshape(B, T, N * H))


def pair(theirs: Options, **wrong):
    """Torch's side and Flax's, which does the same but for `wrong`."""
    return Theirs(theirs), Ours(replace(theirs, fused=False, **wrong))
