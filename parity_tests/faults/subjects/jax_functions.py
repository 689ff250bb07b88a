"""JAX functions and modules, each beside another way to write it: loops, backends, modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from flax_attn import CAUSAL, attend

from ...port import Port, always


def looped(state, x, decay):
    """A gated recurrence, one token at a time."""
    out = []
    for t in range(x.shape[1]):
        state = state * jax.nn.sigmoid(decay[:, t]) + x[:, t]
        out.append(jnp.tanh(state))
    return {"out": jnp.stack(out, 1), "last": (state, None)}


def scanned(state, x, decay):
    def step(state, token):
        state = state * jax.nn.sigmoid(token[1]) + token[0]
        return state, jnp.tanh(state)

    state, out = lax.scan(step, state, (x.swapaxes(0, 1), decay.swapaxes(0, 1)))
    return {"out": out.swapaxes(0, 1), "last": (state, None)}


def associative(state, x, decay):
    def joined(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    gates = jax.nn.sigmoid(decay)
    by, to = lax.associative_scan(joined, (gates, x), axis=1)
    states = by * state[:, None] + to
    return {"out": jnp.tanh(states), "last": (states[:, -1], None)}


class Block(nnx.Module):
    """A gated block: norm, two projections, dropout."""

    def __init__(self, width=6, inner=9, rate=0.0, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * inner, rngs=rngs)
        self.down = nnx.Linear(inner, width, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        gate, up = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.drop(self.down(nnx.silu(gate) * up))


class Rewritten(Block):
    """The same weights; the norm by hand, and the two halves as one einsum."""

    def __call__(self, x):
        mean = x.mean(-1, keepdims=True)
        spread = jnp.square(x - mean).mean(-1, keepdims=True)
        y = (x - mean) * lax.rsqrt(spread + 1e-6) * self.norm.scale[...] + self.norm.bias[...]
        halves = (z.reshape(*z.shape[:-1], 2, -1) for z in (self.up.kernel[...], self.up.bias[...]))
        kernel, bias = halves
        gate, up = jnp.moveaxis(jnp.einsum("...d,dcf->...cf", y, kernel) + bias, -2, 0)
        return x + self.drop(self.down(gate * jax.nn.sigmoid(gate) * up))


def mlp(x, gain, up, down):
    """RMSNorm and a gated unit, with a residual."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain[None]
    gate, value = jnp.split(y @ up, 2, -1)
    return x + (jax.nn.silu(gate) * value) @ down


def by(backend: str) -> Callable[..., Any]:
    return partial(attend, mask=CAUSAL, backend=backend)


def heads_last(length=9) -> list[np.ndarray]:
    drawn = np.random.default_rng(2)
    shapes = (2, length, 4, 5), (2, length, 2, 5), (2, length, 2, 5)
    return [drawn.normal(size=shape) for shape in shapes]


def block(kind=Block, rate=0.0) -> nnx.Module:
    return kind(rate=rate, rngs=nnx.Rngs(4))


def states(seed: int) -> tuple[np.ndarray, ...]:
    drawn = np.random.default_rng(1 + seed)
    return tuple(drawn.normal(size=s) for s in ((3, 4), (3, 7, 4), (3, 7, 4)))


def of_mlp(seed: int) -> tuple[np.ndarray, ...]:
    drawn = np.random.default_rng(seed)
    return tuple(drawn.normal(size=s) for s in ((5, 6), (6,), (6, 16), (8, 6)))


TOKENS = [np.random.default_rng(3).normal(size=(2, 5, 6))]
BOTH = {"dtypes": ("float64", "float32"), "jit": True, "eager": False}
PORTS = [
    Port("JAX loop", lambda: looped, lambda rngs: looped, states, (), BOTH),
    Port("JAX scan", lambda: looped, lambda rngs: scanned, states, (), BOTH),
    Port("JAX associative scan", lambda: scanned, lambda rngs: associative, states, (), BOTH),
    Port("JAX MLP", lambda: mlp, lambda rngs: mlp, of_mlp, (), BOTH),
    Port(
        "two backends",
        lambda: by("reference"),
        lambda rngs: by("blockwise"),
        lambda seed: tuple(heads_last()),
        (),
        BOTH,
    ),
    Port("module written again", block, lambda rngs: block(Rewritten), always(*TOKENS), (), BOTH),
]
