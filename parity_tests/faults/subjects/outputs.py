"""Outputs that a walk over dicts, lists and arrays does not see, and inputs that are nested."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .. import wrong_pairs as wrong  # noqa: F401
from .attention import attend, f_attend, f_merge, f_qkv, f_split, merge, qkv, split
from .pair import B, D, H, N, S, T, linear, normal, pair, projections, torch

X = normal("x", B, T, D)
ONE = {"out": linear(D, 9)}
MLP = {"up": linear(D, 13), "down": linear(13, D)}
CACHE = normal("keys", B, N, S, H), normal("values", B, N, S, H)


@dataclass
class Result:
    """What a library of today returns, no pytree."""

    last: Any
    hidden: Any = None


def returned(name, theirs, ours, x=X):
    """What is made of what `out` gives."""
    return pair(name, ONE, lambda m, x: theirs(m.out(x)), lambda m, x: ours(m.out(x)), (x,))


def result(y):
    return Result(y, y + y.mean())


def f_result(y):
    hidden = y + jnp.mean(y)
    return Result(last=y, hidden=hidden)


def of_all_kinds(y):
    return y, 1 / H**0.5, T, "causal", y.topk(3, dim=-1).indices, y > 0


def f_of_all_kinds(y):
    scale = H**-0.5
    count = T
    word = "causal"
    best = jnp.argsort(-y, axis=-1)[..., :3]
    positive = jnp.greater(y, 0)
    return (y, scale, count, word, best, positive)


def by_name(y):
    return {
        "y": y,
        "positions": np.arange(T),
        "best": y.argmax(-1),
        "spectrum": torch.fft.fft(y),
    }


def f_by_name(y):
    positions = np.arange(0, T)
    best = jnp.argmax(y, axis=-1)
    spectrum = jnp.fft.fft(y)
    return {"y": y, "positions": positions, "best": best, "spectrum": spectrum}


def states(y):
    return (state for state in (y, y * 2))


def f_states(y):
    return (state for state in (y, 2 * y))


def nothing(y):
    _ = torch.relu(y)


def f_nothing(y):
    _ = jnp.maximum(y, 0)


def nested():
    """Hidden states in a list in a dict in a dict."""

    def original(m, x):
        h = torch.relu(m.up(x))
        y = m.down(h)
        return {"y": y, "extra": {"states": [x + y, h, y], "none": None}}

    def port(m, x):
        before = m.up(x)
        h = jnp.maximum(before, 0)
        y = m.down(h)
        states = [y + x, h, y]
        return {"y": y, "extra": {"states": states, "none": None}}

    return pair("a list in dicts", MLP, original, port, (X,))


def with_weights():
    """Attention that returns its weights too."""

    def original(m, x):
        seen = []
        out = attend(*qkv(m, x, N), weighed=lambda w: seen.append(w) or w)
        return m.o(merge(out)), seen[0]

    def port(m, x):
        found = []
        out = f_attend(*f_qkv(m, x, N), weighed=lambda w: found.append(w) or w)
        return m.o(f_merge(out)), found[0]

    return pair("attention that returns its weights", projections(), original, port, (X,))


def cached():
    """Attention over a cache, a pair of keys and values that are there already."""

    def original(m, x, cache):
        k, v = cache
        return m.o(merge(attend(split(m.q(x), N), k, v)))

    def port(m, x, cache):
        k, v = cache[0], cache[1]
        out = f_attend(f_split(m.q(x), N), k.swapaxes(1, 2), v.swapaxes(1, 2))
        return m.o(f_merge(out))

    parts = {name: part for name, part in projections().items() if name in "qo"}
    return pair("a cache given as a tuple", parts, original, port, {"x": X, "cache": CACHE})


PORTS = [
    returned("a dataclass", result, f_result),
    returned("outputs of all kinds", of_all_kinds, f_of_all_kinds),
    returned("outputs by name", by_name, f_by_name),
    returned("a generator", states, f_states),
    returned("no batch", torch.tanh, lambda y: jnp.tanh(y), X[:0]),
    returned("nothing returned", nothing, f_nothing),
    nested(),
    with_weights(),
    cached(),
]
