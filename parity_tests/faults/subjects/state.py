"""What a call leaves behind, and what is trained."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from .pair import B, D, Part, T, linear, normal, pair, parameter, torch

X = normal("x", B, T, D)
ROWS = normal("rows", 6, D)
ZEROS = np.linspace(0.0, 1.0, 9)


def frozen(rngs):
    return nnx.Variable(jnp.ones(D))


def gained(name, gain):
    """A gain before a projection."""

    def original(m, x):
        return m.out(x * m.gain)

    def port(m, x):
        return m.out(x * m.gain[...])

    return pair(name, {"gain": gain, "out": linear(D, 9)}, original, port, (X,))


def frozen_layer():
    """A whole projection that torch does not train."""

    def theirs():
        return torch.nn.Linear(D, 13).requires_grad_(False)

    def ours(rngs):
        made = nnx.Linear(D, 13, rngs=rngs)
        made.kernel, made.bias = nnx.Variable(made.kernel[...]), nnx.Variable(made.bias[...])
        return made

    def original(m, x):
        return m.down(torch.tanh(m.up(x)))

    def port(m, x):
        return m.down(jnp.tanh(m.up(x)))

    parts = {"up": Part(theirs, ours), "down": linear(13, D)}
    return pair("a frozen projection", parts, original, port, (X,))


def kept(name, first, theirs, ours, train=False, kind=nnx.BatchStat):
    """A buffer of torch, a variable of Flax, that a call may change."""
    buffer = Part(lambda: torch.tensor(first), lambda rngs: kind(jnp.asarray(first)))

    def original(m, x):
        y = m.out(x)
        m.kept.copy_(theirs(m.kept, y.detach()))
        return y

    def port(m, x):
        y = m.out(x)
        m.kept[...] = ours(m.kept[...], y)
        return y

    rules = (Rule("kept -> kept"),) if kind is nnx.BatchStat else ()
    options = {"train": train, "weights": "given"}  # since random weights leave buffers out
    return pair(name, {"out": linear(D, 9), "kept": buffer}, original, port, (X,), options, rules)


def moved(kept, y):
    return 0.8 * kept + 0.2 * y.mean((0, 1))


def f_moved(kept, y):
    return 0.8 * kept + 0.2 * jnp.mean(y, axis=(0, 1))


def counted(kept, y):
    return kept + 1


def f_counted(kept, y):
    return 1 + kept


def unchanged(kept, y):
    return kept


def f_unchanged(kept, y):
    left = kept
    return left


def batch_norm():
    """A batch norm, whose share of torch is that of the new."""
    norm = Part(
        lambda: torch.nn.BatchNorm1d(D, momentum=0.3),
        lambda rngs: nnx.BatchNorm(D, momentum=1 - 0.3, epsilon=1e-5, rngs=rngs),
    )

    def run(m, x):
        return m.out(m.norm(x))

    parts = {"norm": norm, "out": linear(D, 9)}
    return pair("a batch norm's statistics", parts, run, run, (ROWS,), {"train": True})


PORTS = [
    gained("a gain", parameter(D)),
    gained(
        "a frozen gain",
        Part(lambda: torch.nn.Parameter(torch.ones(D), requires_grad=False), frozen),
    ),
    frozen_layer(),
    kept("a counter", 3, counted, f_counted, kind=nnx.Variable),
    kept("a moving average", ZEROS, moved, f_moved, train=True),
    kept("a moving average in eval mode", ZEROS, moved, f_moved),
    kept("a statistic that stays", ZEROS, unchanged, f_unchanged),
    batch_norm(),
]
