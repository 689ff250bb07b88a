"""Outputs that a walk over dicts, lists and arrays does not see, and inputs that are nested."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, f_split, merge, qkv, split
from .fault import Strange
from .pair import B, D, H, N, Pair, S, T, linear, normal, projections, torch

G = "dropped outputs"
X = normal("x", B, T, D)
ONE = {"out": linear(D, 9)}
MLP = {"up": linear(D, 13), "down": linear(13, D)}


@dataclass
class Result:
    """What a library of today returns, no pytree."""

    last: Any
    hidden: Any = None


def returned(theirs, ours, x=X, parts=ONE):
    """`theirs(y, x)` and `ours(share, y, x)` of what `out` gives."""
    return Pair(
        parts,
        lambda m, x: theirs(m.out(x), x),
        lambda m, share, x: ours(share, m.out(x), x),
        (x,),
    )


def _nested():
    """Hidden states in a list in a dict in a dict; the second before its activation."""

    def original(m, x):
        h = torch.relu(m.up(x))
        y = m.down(h)
        return {"y": y, "extra": {"states": [x + y, h, y], "none": None}}

    def port(m, share, x):
        before = m.up(x)
        h = jnp.maximum(before, 0)
        y = m.down(h)
        return {"y": y, "extra": {"states": [x + y, share(h, before), y], "none": None}}

    return Pair(MLP, original, port, (X,))


def _one_off(share, y):
    """The best id; one too high everywhere, or in one place."""
    return y.argmax(-1) + jnp.asarray(1 if share.size == 1 else np.arange(T) == 2, int) * bool(
        share
    )


def _third_for_second(share, y):
    order = jnp.argsort(-y, axis=-1)[..., :3]
    return order[..., np.array([0, 2, 1])] if share else order


def _conjugated(share, y):
    z = jnp.fft.fft(y)
    return share(z, jnp.conj(z))


def _inverted(share, y):
    return (y > 0) ^ bool(share)


def cached(wrong):
    """Attention over a cache, a pair of keys and values that are there already."""

    def original(m, x, cache):
        k, v = cache
        return m.o(merge(attend(split(m.q(x), N), k, v)))

    def port(m, share, x, cache):
        k, v = wrong(share, *cache)
        q = f_split(m.q(x), N)
        return m.o(f_merge(f_attend(q, k.swapaxes(1, 2), v.swapaxes(1, 2))))

    cache = normal("keys", B, N, S, H), normal("values", B, N, S, H)
    parts = {name: part for name, part in projections().items() if name in "qo"}
    return Pair(parts, original, port, kwargs={"x": X, "cache": cache})


def _with_weights(left_out):
    """Attention that returns its weights too; Flax returns `left_out` of them."""

    def original(m, x):
        found = []
        out = attend(*qkv(m, x, N), weighed=lambda w: found.append(w) or w)
        return m.o(merge(out)), found[0]

    def port(m, share, x):
        found = []
        out = f_attend(*f_qkv(m, x, N), weighed=lambda w: found.append(w) or w)
        return m.o(f_merge(out)), left_out(share, found[0])

    return Pair(projections(), original, port, (X,))


FAULTS = [
    Strange(
        "a dataclass, its field times -7",
        G,
        returned(lambda y, x: Result(y), lambda share, y, x: Result(share(y, -7 * y))),
        "output.last",
    ),
    Strange(
        "the second field of a dataclass from before the sum",
        G,
        returned(
            lambda y, x: Result(y, y + y.mean()),
            lambda share, y, x: Result(y, share(y + y.mean(), y)),
        ),
        "output.hidden",
    ),
    Strange(
        "a Python number inverted",
        G,
        returned(lambda y, x: (y, H**-0.5), lambda share, y, x: (y, share.of(H**-0.5, H**0.5))),
        "output[1]",
    ),
    Strange(
        "a whole number one too high",
        G,
        returned(lambda y, x: (y, T), lambda share, y, x: (y, T + bool(share))),
        "output[1]",
        low=False,
    ),
    Strange(
        "a numpy array counted from one",
        G,
        returned(
            lambda y, x: {"y": y, "positions": np.arange(T)},
            lambda share, y, x: {"y": y, "positions": np.arange(T) + bool(share)},
        ),
        "output.positions",
        low=False,
    ),
    Strange(
        "None where torch returns weights",
        G,
        _with_weights(lambda share, w: None if share else w),
        "output[1]",
        low=False,
    ),
    Strange(
        "another word",
        G,
        returned(
            lambda y, x: (y, "causal"), lambda share, y, x: (y, "full" if share else "causal")
        ),
        "output[1]",
        low=False,
    ),
    Strange(
        "a state in a list in dicts before its activation", G, _nested(), "output.extra.states[1]"
    ),
    Strange(
        "one output more than torch",
        G,
        returned(lambda y, x: [y], lambda share, y, x: [y, *([x] if share else [])]),
        "output[1]",
        low=False,
    ),
    Strange(
        "a generator of states",
        G,
        returned(
            lambda y, x: (state for state in (y, y * 2)),
            lambda share, y, x: (state for state in (share(y, -y), y * 2)),
        ),
        "output",
        "generator",
        lonely="nothing that a generator holds is compared",
    ),
    Strange(
        "the best index one too high",
        G,
        returned(
            lambda y, x: {"logits": y, "best": y.argmax(-1)},
            lambda share, y, x: {"logits": y, "best": _one_off(share, y)},
        ),
        "output.best",
    ),
    Strange(
        "the third best before the second",
        G,
        returned(
            lambda y, x: (y, y.topk(3, dim=-1).indices),
            lambda share, y, x: (y, _third_for_second(share, y)),
        ),
        "output[1]",
        low=False,
    ),
    Strange(
        "a mask inverted",
        G,
        returned(lambda y, x: (y, y > 0), lambda share, y, x: (y, _inverted(share, y))),
        "output[1]",
        low=False,
    ),
    Strange(
        "complex numbers conjugated",
        G,
        returned(
            lambda y, x: {"y": y, "spectrum": torch.fft.fft(y)},
            lambda share, y, x: {"y": y, "spectrum": _conjugated(share, y)},
        ),
        "output.spectrum",
    ),
    Strange(
        "no batch, the function another",
        G,
        returned(lambda y, x: y, lambda share, y, x: share(y, -7 * y), x=X[:0]),
        "whole run|output",
        "nothing|empty|size 0",
        lonely="an empty output shows nothing",
    ),
    Strange(
        "nothing but None returned",
        G,
        returned(lambda y, x: None, lambda share, y, x: None),
        "whole run|output",
        "nothing|None",
        low=False,
        lonely="nothing is returned",
    ),
    Strange(
        "keys and values of a cache exchanged",
        G,
        cached(lambda share, k, v: (share(k, v), share(v, k))),
        "key",
        "value in its place|input|exchanged|swapped",
    ),
    Strange(
        "a cache's values seen one place late",
        G,
        cached(lambda share, k, v: (k, share(v, jnp.roll(v, 1, 2)))),
        "value",
        "shifted",
    ),
    Strange(
        "no gradient to a cache's keys",
        G,
        cached(lambda share, k, v: (share(k, jax.lax.stop_gradient(k)), v)),
        "input cache[0]|key",
        "stopped|times 0.9999",
    ),
]
