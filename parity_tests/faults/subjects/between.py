"""Plain functions between two submodules, which no tap sees."""

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import F
from .pair import B, D, Part, T, embedding, linear, normal, pair, tokens, torch

X = normal("x", B, T, D)
W = 13
IDS = tokens(B, T, below=17)
TWO = {"up": linear(D, W), "down": linear(W, D)}
THREE = {"gate": linear(D, W), **TWO}
BOTH = {"both": linear(D, 2 * W), "down": linear(W, D)}


def two(name, theirs, ours, **parts):
    """Something between `up` and `down`, of the module and of what `up` gives."""

    def original(m, x):
        return m.down(theirs(m, m.up(x)))

    def port(m, x):
        return m.down(ours(m.up(x)))

    return pair(name, {**TWO, **parts}, original, port, (X,))


def three(name, theirs, ours):
    """Something of what `gate` and `up` give, in this order, before `down`."""

    def original(m, x):
        return m.down(theirs(m.gate(x), m.up(x)))

    def port(m, x):
        return m.down(ours(m.gate(x), m.up(x)))

    return pair(name, THREE, original, port, (X,))


def gelu(y):
    return jax.nn.gelu(y, approximate=True)


def squared_relu(y):
    return jax.nn.relu(y) ** 2


def normed(y):
    """L2 over the last axis, as F.normalize has it."""
    return y / jnp.maximum(jnp.sqrt((y**2).sum(-1, keepdims=True)), 1e-12)


def softplus(y):
    return nnx.softplus(y)


def averaged(y):
    return jnp.mean(y, axis=1)


def shifted(y):
    """Each token mixed with the one before it."""
    none = jnp.zeros_like(y[:, :1])
    return y + jnp.concatenate([none, y[:, :-1]], 1)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def glu(gate, up):
    return jax.nn.sigmoid(gate) * up


def residual():
    """A sum of the input and of half of `mix` before `out`."""

    def original(m, x):
        return m.out(x + 0.5 * m.mix(x))

    def port(m, x):
        y = m.mix(x)
        return m.out(x + 0.5 * y)

    parts = {"mix": linear(D, D), "out": linear(D, 9)}
    return pair("a scaled residual", parts, original, port, (X,))


def gate_and_up():
    """One projection for both halves."""

    def original(m, x):
        gate, up = m.both(x).chunk(2, dim=-1)
        return m.down(F.silu(gate) * up)

    def port(m, x):
        y = m.both(x)
        gate, up = jnp.split(y, 2, axis=-1)
        return m.down(nnx.silu(gate) * up)

    return pair("gate and up in one projection", BOTH, original, port, (X,))


def positions():
    """Learnt positions added by hand, from the third row of the table on."""

    def original(m, ids):
        return m.out(m.embed(ids) + m.positions.weight[torch.arange(T) + 2])

    def port(m, ids):
        rows = jnp.arange(T) + 2
        return m.out(m.embed(ids) + m.positions.embedding[...][rows])

    parts = {"embed": embedding(17, D), "positions": embedding(T + 3, D), "out": linear(D, 9)}
    return pair("positions from the third row on", parts, original, port, (IDS,))


def joined():
    """Two halves joined."""

    def original(m, x):
        return m.out(torch.cat([m.left(x), m.right(x)], dim=-1))

    def port(m, x):
        left, right = m.left(x), m.right(x)
        return m.out(jnp.concatenate([left, right], axis=-1))

    parts = {"left": linear(D, W), "right": linear(D, W), "out": linear(2 * W, 9)}
    return pair("two halves joined", parts, original, port, (X,))


PORTS = [
    two("GELU by tanh", lambda m, y: F.gelu(y, approximate="tanh"), gelu),
    two("squared ReLU", lambda m, y: F.relu(y) ** 2, squared_relu),
    two("vectors of length one", lambda m, y: F.normalize(y, dim=-1), normed),
    two("the mean of all tokens", lambda m, y: y.mean(1), averaged),
    two("each token and the one before", lambda m, y: y + F.pad(y, (0, 0, 1, -1)), shifted),
    two(
        "a submodule's activation",
        lambda m, y: m.act(y),
        softplus,
        act=Part(torch.nn.Softplus, lambda rngs: None),
    ),
    three("SwiGLU", lambda gate, up: F.silu(gate) * up, swiglu),
    three("a sigmoid gate", lambda gate, up: torch.sigmoid(gate) * up, glu),
    residual(),
    gate_and_up(),
    positions(),
    joined(),
]
