"""A layer of Llama: rotary positions, few key heads, RMSNorm, SwiGLU."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import normal, torch

F = torch.nn.functional


class TorchLayer(torch.nn.Module):
    """A layer of Llama (Touvron et al. 2023) with six query heads and three key heads."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (torch.nn.RMSNorm(11, eps=1e-5) for _ in range(2))
        self.q_proj = torch.nn.Linear(11, 24, bias=False)
        self.k_proj, self.v_proj = (torch.nn.Linear(11, 12, bias=False) for _ in range(2))
        self.o_proj = torch.nn.Linear(24, 11, bias=False)
        self.gate, self.up = (torch.nn.Linear(11, 13, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(13, 11, bias=False)

    def rotated(self, y):  # B N T H
        rates = 10000.0 ** (-torch.arange(0, 4, 2, dtype=y.dtype) / 4)
        angles = torch.outer(torch.arange(y.shape[2], dtype=y.dtype), rates)
        cos, sin = torch.cos(angles).repeat(1, 2), torch.sin(angles).repeat(1, 2)
        one, two = y.chunk(2, dim=-1)
        return y * cos + torch.cat([-two, one], dim=-1) * sin

    def forward(self, x):  # B T D
        y, length = self.norm1(x), x.shape[1]
        parts = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(2, dim=1) for part in (self.rotated(k), v))
        scores = self.rotated(q) @ k.mT / math.sqrt(4)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        x = x + self.o_proj((weights @ v).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Layer(nnx.Module):
    """The same, queries grouped by their key head, the first norm written out."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(11))
        self.q = nnx.Param(jnp.zeros((11, 3, 2, 4)))
        self.k = nnx.LinearGeneral(11, (3, 4), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(11, (3, 4), use_bias=False, rngs=rngs)
        self.o = nnx.Linear(24, 11, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(11, epsilon=1e-5, rngs=rngs)
        self.gate_up = nnx.Linear(11, 26, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(13, 11, use_bias=False, rngs=rngs)

    def rotated(self, y):  # B T K ... H
        rates = 10000.0 ** (-jnp.arange(0, 4, 2, dtype=y.dtype) / 4)
        angles = jnp.arange(y.shape[1], dtype=y.dtype)[:, None] * rates
        angles = jnp.expand_dims(angles, axis=tuple(range(1, y.ndim - 2)))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        one, two = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def __call__(self, x):  # B T D
        y = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)
        y = y * self.scale[...]
        q = self.rotated(jnp.einsum("btd,dkgh->btkgh", y, self.q[...]))
        k, v = self.rotated(self.k(y)), self.v(y)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / math.sqrt(4)
        places = jnp.arange(x.shape[1])
        seen = places[:, None] >= places[None, :]
        scores = jnp.where(seen, scores, jnp.finfo(x.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
        x = x + self.o(out.reshape(*x.shape[:2], 24))
        gate, up = jnp.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return x + self.down(gate * jax.nn.sigmoid(gate) * up)


PORTS = [
    Port(
        "Llama",
        TorchLayer,
        Layer,
        lambda seed: (normal(seed, "llama", 5, 7, 11),),
        (
            Rule("norm1.weight -> scale"),
            Rule("q_proj.weight -> q", "(k g h) i -> i k g h", k=3, g=2),
            Rule("k_proj.weight -> k.kernel", "(k h) i -> i k h", k=3),
            Rule("v_proj.weight -> v.kernel", "(k h) i -> i k h", k=3),
            Rule("o_proj -> o"),
            Rule("{gate,up}.weight -> gate_up.kernel", "n o i -> i (n o)"),
        ),
    ),
]
