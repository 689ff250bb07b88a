"""Dropout whose masks both sides share, so that only the way they are drawn tells."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.taps import tap

from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv, same
from .fault import Strange
from .pair import B, D, N, Pair, Part, T, linear, normal, projections, torch

G = "kept share"
RATE = 0.1
X = normal("x", B, T, D)
WIDE = normal("wide", 4, 11, D)
DROP = "drop|drop.keep|keep|whole run"


class Drop(nnx.Module):
    """Dropout by one Bernoulli draw.

    Args:
      drawn: the share that is drawn as kept.
      by: the number by which what is kept is divided.
      key: the number of a fixed key, or None.
      always: whether it drops in eval mode too.
    """

    def __init__(self, rngs, drawn=1 - RATE, by=1 - RATE, key=None, always=False):
        self.drawn, self.by, self.key, self.always = drawn, by, key, always
        self.rngs, self.deterministic = nnx.Rngs(dropout=1), False

    def __call__(self, x):
        if self.deterministic and not self.always:
            return x
        key = self.rngs.dropout() if self.key is None else jax.random.key(self.key)
        keep = jax.random.bernoulli(key, self.drawn, x.shape)
        return jnp.where(keep, x / self.by, 0)


class Told(Drop):
    """Dropout that draws for one sequence and tells of a mask for all."""

    def __call__(self, x):
        if self.deterministic:
            return x
        one = jax.random.uniform(self.rngs.dropout(), x.shape[1:]) < self.drawn
        keep = tap("keep", jnp.broadcast_to(one, x.shape))
        return jnp.where(keep, x / self.by, 0)


class Nothing(nnx.Module):
    """No dropout."""

    def __init__(self, rngs):
        pass

    def __call__(self, x):
        return x


def drop(wrong, right=Drop):
    """Torch's dropout, and Flax's with a fault or without."""
    return Part(
        lambda: torch.nn.Dropout(RATE),
        lambda rngs, share: (wrong if share else right)(rngs),
    )


def in_attention(wrong, right=Drop, train=True):
    """Dropout of attention's weights."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N), weighed=m.drop)))

    def port(m, share, x):
        return m.o(f_merge(f_attend(*f_qkv(m, x, N), weighed=m.drop)))

    parts = {**projections(), "drop": drop(wrong, right)}
    return Pair(parts, original, port, (X,), options={"train": train})


def in_mlp(wrong, right=Drop, train=True):
    """Dropout between two projections."""

    def original(m, x):
        return m.down(m.drop(torch.relu(m.up(x))))

    def port(m, share, x):
        return m.down(m.drop(jnp.maximum(m.up(x), 0)))

    parts = {"up": linear(D, 13), "down": linear(13, D), "drop": drop(wrong, right)}
    return Pair(parts, original, port, (WIDE,), options={"train": train})


def _on_scores():
    """Dropout before the softmax, where torch has it behind."""

    def original(m, x):
        return m.o(merge(attend(*qkv(m, x, N), weighed=m.drop)))

    def port(m, share, x):
        before, behind = (m.drop, same) if share else (same, m.drop)
        return m.o(f_merge(f_attend(*f_qkv(m, x, N), modify_logits=before, weighed=behind)))

    parts = {**projections(), "drop": drop(Drop)}
    return Pair(parts, original, port, (X,), options={"train": True})


def rated(rate, **shared):
    return lambda rngs: nnx.Dropout(rate, rngs=nnx.Rngs(dropout=1), **shared)


KEPT = "kept|keep|rate|share"
ONCE = {"low": False}
FAULTS = [
    Strange(
        "one in ten kept, where nine are",
        G,
        in_attention(partial(Drop, drawn=RATE)),
        DROP,
        KEPT,
        **ONCE,
    ),
    Strange(
        "the rate taken for the keep rate, in all",
        G,
        in_mlp(rated(1 - RATE), rated(RATE)),
        DROP,
        "kept|keep|rate|scale",
        **ONCE,
    ),
    Strange(
        "a rate of 0.4, what is kept scaled as by 0.1",
        G,
        in_mlp(partial(Drop, drawn=0.6)),
        DROP,
        KEPT,
        **ONCE,
    ),
    Strange(
        "a mask from a fixed key",
        G,
        in_mlp(partial(Drop, key=7)),
        DROP,
        "key|same mask|fixed",
        **ONCE,
    ),
    Strange(
        "one mask for all heads",
        G,
        in_attention(rated(RATE, broadcast_dims=(1,)), rated(RATE)),
        DROP,
        "mask|shape",
        **ONCE,
    ),
    Strange(
        "one mask for the batch",
        G,
        in_mlp(rated(RATE, broadcast_dims=(0,)), rated(RATE)),
        DROP,
        "mask|shape",
        **ONCE,
    ),
    Strange("one mask for the batch, told as one for each", G, in_mlp(Told), DROP, **ONCE),
    Strange(
        "what is kept not scaled",
        G,
        in_attention(partial(Drop, by=1.0)),
        "drop",
        "not scaled|scale",
        **ONCE,
    ),
    Strange(
        "what is kept scaled by the root",
        G,
        in_mlp(partial(Drop, by=(1 - RATE) ** 0.5)),
        "drop",
        "scale",
        **ONCE,
    ),
    Strange(
        "dropout in eval mode",
        G,
        in_mlp(partial(Drop, always=True), train=False),
        DROP,
        "eval",
        **ONCE,
    ),
    Strange(
        "no dropout in train mode",
        G,
        in_attention(Nothing),
        DROP,
        "dropout|missing",
        **ONCE,
    ),
    Strange("dropout before the softmax", G, _on_scores(), "drop|weights|scores", **ONCE),
]
