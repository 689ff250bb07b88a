"""Faults from the softmax to the output projection: softmax, dropout, heads."""

import jax
import jax.numpy as jnp
from flax import nnx

from . import trial_flax as right
from .fault import A, Fault, Plant, part
from .setup import Setup, mixed, one
from .sizes import RATE

TRAIN = {"options": {"train": True}}
W, DROP = f"{A}weights", f"{A}dropout"


def softmaxed(wrong, low=mixed):
    return part("softmax", wrong, low=low)


def _over(axis):
    def softmax(scores):
        finite = jnp.where(jnp.isfinite(scores), scores, -1e30)
        return jax.nn.softmax(finite, axis=axis)

    return softmax


def _narrow(scores):
    return right.softmax(scores.astype(jnp.float32)).astype(scores.dtype)


def _base_two(scores):
    raised = jnp.exp2(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def _plus(extra):
    def softmax(scores):
        raised = jnp.exp(scores - scores.max(-1, keepdims=True))
        return raised / (raised.sum(-1, keepdims=True) + extra)

    return softmax


def _truncated(scores):
    weights = right.softmax(scores)
    return jnp.where(weights < 1e-3, 0.0, weights)


def dropped(wrong, low=mixed):
    """Another dropout behind the softmax, in train mode."""
    return part("dropped", wrong, low=low, **TRAIN)


class Dropout(nnx.Dropout):
    """Draws as `nnx.Dropout` does; `finish(x, keep)` makes what it will of the mask."""

    finish = staticmethod(lambda x, keep: jnp.where(keep, x / (1 - RATE), 0.0))
    low = None

    def mask(self, x):
        return jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape)

    def __call__(self, x):
        keep = self.mask(x)
        good = jnp.where(keep, x / (1 - RATE), 0.0)
        bad = type(self).finish(x, keep)
        return mixed(lambda: good, lambda: bad)() if self.low else bad


def finished(finish) -> Plant:
    """Every dropout draws right, applies its mask as `finish` says; slightly at low amplitude."""

    def plant(is_low: bool) -> Setup:
        kind = type("Faulty", (Dropout,), {"finish": staticmethod(finish), "low": is_low})
        return Setup(build=lambda module: _other_dropout(module, kind, (0, 1)), deep=True, **TRAIN)

    return plant


def drawn(kind, train=True) -> Plant:
    """Another dropout module; at low amplitude in the last layer alone."""

    def plant(is_low: bool) -> Setup:
        where = (1,) if is_low else (0, 1)
        options = {"train": train}
        return Setup(
            build=lambda module: _other_dropout(module, kind, where), deep=True, options=options
        )

    return plant


def _other_dropout(module, kind, layers):
    for i in layers:
        module.layers[i].attn.dropout = kind(RATE, rngs=nnx.Rngs(5))
    return module


class Never(nnx.Module):
    def __init__(self, rate, *, rngs):
        pass

    def __call__(self, x):
        return x


class Always(nnx.Dropout):
    """Drops in eval mode too."""

    def __call__(self, x):
        return super().__call__(x, deterministic=False)


class Twice(nnx.Dropout):
    def __call__(self, x):
        return super().__call__(super().__call__(x))


class SharedByHeads(Dropout):
    def mask(self, x):
        shape = (x.shape[0], 1, *x.shape[2:])
        return jax.random.bernoulli(self.rngs(), 1 - self.rate, shape)


def _drop_before(is_low: bool) -> Setup:
    """Scores are shrunk before the softmax."""

    def drop_in(scores):
        return jnp.where(jnp.isfinite(scores), scores * 0.9, scores)

    wrong = mixed(right.same, drop_in) if is_low else drop_in
    return Setup(parts=(("", "drop_in", wrong),), **TRAIN)


def _renormalised(weights):
    return weights / (weights.sum(-1, keepdims=True) + 1e-9)


S = "softmax and dropout"
SOFTMAX = [
    Fault("softmax over queries", S, softmaxed(_over(-2)), W, "wrong axis, queries"),
    Fault("softmax over heads", S, softmaxed(_over(1)), W, "wrong axis, heads"),
    Fault("softmax in float32", S, softmaxed(_narrow, one), W, "float32"),
    Fault("softmax to base two", S, softmaxed(_base_two), W, "base 2"),
    Fault("one more in the denominator", S, softmaxed(_plus(1.0)), W, "denominator"),
    Fault("1e-6 in the denominator", S, softmaxed(_plus(1e-6)), W, "denominator"),
    Fault("sigmoid for softmax", S, softmaxed(jax.nn.sigmoid), W, "sigmoid"),
    Fault("small weights set to zero", S, softmaxed(_truncated), W),
    Fault("a temperature of 1.1", S, softmaxed(lambda s: right.softmax(s / 1.1)), W, "temperature"),
    Fault(
        "uniform over what is seen",
        S,
        softmaxed(lambda s: right.softmax(jnp.where(jnp.isfinite(s), 0.0, s))),
        W,
        "uniform",
    ),
]
DROPOUT = [
    Fault("dropout missing", S, drawn(Never), ""),
    Fault("dropout in eval mode too", S, drawn(Always, train=False), ""),
    Fault("one dropout mask too many", S, drawn(Twice), ""),
    Fault("dropout mask shared by heads", S, drawn(SharedByHeads), ""),
    Fault(
        "kept weights not scaled up",
        S,
        finished(lambda x, keep: jnp.where(keep, x, 0.0)),
        DROP,
        "not scaled up|another scale",
    ),
    Fault(
        "kept weights scaled by the rate",
        S,
        finished(lambda x, keep: jnp.where(keep, x / RATE, 0.0)),
        DROP,
        "scaled by its rate|another scale",
    ),
    Fault(
        "dropped weights kept, others dropped",
        S,
        finished(lambda x, keep: jnp.where(keep, 0.0, x / (1 - RATE))),
        DROP,
        "inverted",
    ),
    Fault("renormalised behind dropout", S, dropped(_renormalised), f"{A}context", "renormalised"),
    Fault("scores shrunk in train mode", S, _drop_before, W, "temperature"),
]


def _direct(y, heads):
    """B T (N h) read as B N T h."""
    shape = (y.shape[0], heads, y.shape[1], -1)
    return y.reshape(shape).swapaxes(1, 2)


def _width_first(y, heads):
    return y.reshape(*y.shape[:-1], -1, heads).swapaxes(-1, -2)


def _tiled(x, times):
    return jnp.tile(x, (1, 1, times, 1))


def _only_first(x, times):
    return jnp.repeat(x[:, :, :1], times * x.shape[2], axis=2)


def _mean_in_group(weights, v):
    out = right.mix(weights, v)
    pairs = out.reshape(*out.shape[:2], -1, 2, out.shape[-1])
    return jnp.repeat(pairs.mean(3), 2, axis=2)


def merged(wrong):
    return part("merge", wrong)


OUT = f"{A}o_proj"
H = "heads"
HEADS = [
    Fault(
        "merged without moving heads",
        H,
        merged(lambda y: y.swapaxes(1, 2).reshape(*y.shape[:-2], -1)),
        OUT,
        "heads",
    ),
    Fault("merged as (h n)", H, merged(lambda y: right.merge(y.swapaxes(-1, -2))), OUT, "heads"),
    Fault("merged in reverse order", H, merged(lambda y: right.merge(y[:, :, ::-1])), OUT, "heads"),
    Fault(
        "the last head lost", H, merged(lambda y: right.merge(y.at[:, :, -1].set(0.0))), OUT, "lost"
    ),
    Fault("queries split as (h n)", H, part("split_q", _width_first), f"{A}query", "heads"),
    Fault("keys split as (h k)", H, part("split_k", _width_first), f"{A}key", "heads"),
    Fault("values split as (h k)", H, part("split_v", _width_first), f"{A}value", "heads"),
    Fault("queries split across positions", H, part("split_q", _direct), f"{A}query", "positions"),
    Fault("key heads tiled", H, part("repeat_k", _tiled), f"{A}key", "tiled"),
    Fault("value heads tiled", H, part("repeat_v", _tiled), f"{A}value", "tiled"),
    Fault(
        "the first key head for all",
        H,
        part("repeat_k", _only_first),
        f"{A}key",
        "one head for all",
    ),
    Fault("heads of a group averaged", H, part("mix", _mean_in_group), f"{A}context"),
    Fault(
        "weights transposed",
        H,
        part("mix", lambda w, v: right.mix(w.mT, v), pair="square"),
        f"{A}context",
        "weights transposed",
    ),
    Fault(
        "keys and queries exchanged in scores",
        H,
        part("product", lambda q, k: right.product(k, q), pair="square"),
        f"{A}scores",
        "exchanged",
    ),
    Fault(
        "values of the next sequence",
        H,
        part("mix", lambda w, v: right.mix(w, v[::-1])),
        f"{A}context",
    ),
]
FAULTS = SOFTMAX + DROPOUT + HEADS
