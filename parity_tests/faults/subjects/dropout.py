"""Dropout whose masks both sides share, so that only the way they are drawn tells."""

import jax
import jax.numpy as jnp
from flax import nnx

from .. import wrong_pairs as wrong  # noqa: F401
from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv
from .pair import B, D, N, Part, T, linear, normal, pair, projections, torch

RATE = 0.1
X = normal("x", B, T, D)
WIDE = normal("wide", 4, 11, D)


class Drop(nnx.Module):
    """Dropout by one Bernoulli draw."""

    def __init__(self, rngs):
        self.rngs, self.deterministic = nnx.Rngs(dropout=1), False

    def __call__(self, x):
        if self.deterministic:
            return x
        keep = jax.random.bernoulli(self.rngs.dropout(), 1 - RATE, x.shape)
        return jnp.where(keep, x / (1 - RATE), 0)


def library(rngs):
    """Flax's own dropout."""
    return nnx.Dropout(RATE, rngs=rngs)


def in_attention(name, kind):
    """Dropout of attention's weights."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N), weighed=m.drop)))

    def port(m, x):
        q, k, v = f_qkv(m, x, N)
        return m.o(f_merge(f_attend(q, k, v, weighed=m.drop)))

    parts = {**projections(), "drop": Part(lambda: torch.nn.Dropout(RATE), kind)}
    return pair(name, parts, original, port, (X,), {"train": True})


def in_mlp(name, kind, train=True):
    """Dropout between two projections."""

    def original(m, x):
        return m.down(m.drop(torch.relu(m.up(x))))

    def port(m, x):
        return m.down(m.drop(jnp.maximum(m.up(x), 0)))

    parts = {
        "up": linear(D, 13),
        "down": linear(13, D),
        "drop": Part(lambda: torch.nn.Dropout(RATE), kind),
    }
    return pair(name, parts, original, port, (WIDE,), {"train": train})


PORTS = [
    in_attention("dropout of weights", Drop),
    in_attention("Flax's dropout of weights", library),
    in_mlp("dropout between projections", Drop),
    in_mlp("Flax's dropout between projections", library),
    in_mlp("dropout in eval mode", Drop, train=False),
]
