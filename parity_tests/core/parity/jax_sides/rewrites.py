"""Rewrites of JAX functions that are right: other operations, orders, loops, backends, modules."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from flax_attn import CAUSAL, attend

from . import attentions
from .attentions import formula, inputs


class Rewrite(NamedTuple):
    """Two functions that are the same, with their inputs."""

    first: Callable[..., Any]
    second: Callable[..., Any]
    inputs: list[Any]
    grads: bool = True


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


X, STATES = inputs(), [np.random.default_rng(1).normal(size=s) for s in ((3, 4), (3, 7, 4))]
STATES = [*STATES, np.random.default_rng(5).normal(size=(3, 7, 4))]
TOKENS = [np.random.default_rng(3).normal(size=(2, 5, 6))]
REWRITES = {
    "a softmax in float32": Rewrite(formula, attentions.single, X),
    "a query at a time": Rewrite(formula, attentions.rows, X),
    "vmap over heads": Rewrite(formula, attentions.each_head, X),
    "blocks of keys": Rewrite(formula, attentions.online, X),
    "a Pallas kernel": Rewrite(formula, attentions.kernel, X, grads=False),
    "a backward pass by hand": Rewrite(formula, attentions.by_hand, X),
    "jax.nn": Rewrite(formula, attentions.of_jax, X),
    "a jitted function": Rewrite(formula, jax.jit(attentions.each_head), X),
    "a scan": Rewrite(looped, scanned, STATES),
    "an associative scan": Rewrite(scanned, associative, STATES),
    "two backends": Rewrite(by("reference"), by("blockwise"), heads_last()),
    "a module written again": Rewrite(block(), block(Rewritten), TOKENS),
}
