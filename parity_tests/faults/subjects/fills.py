"""Huge numbers: fills in outputs, float masks as inputs, one element above all the others."""

import jax.numpy as jnp
import numpy as np

from .. import wrong_pairs as wrong  # noqa: F401
from .attention import attend, f_attend, f_merge, f_qkv, f_scaled, f_split, merge, qkv, split
from .pair import B, D, H, N, T, linear, normal, pair, projections, torch

X = normal("x", B, T, D)
SEEN = np.tril(np.ones((T, T), bool))
MASK = np.ones((B, 1, 1, T))
MASK[0, ..., 3:], MASK[1, ..., 0] = 0.0, 0.0
GAIN = np.where(np.arange(D) == 4, 1e20, 1.0)
BANNED = np.arange(11) % 3 == 1
TWO = {"q": linear(D, N * H), "k": linear(D, N * H)}


def least(x):
    """The lowest number of an array's dtype, on either side."""
    return torch.finfo(x.dtype).min if torch.is_tensor(x) else float(jnp.finfo(x.dtype).min)


def scores(name, theirs, ours, **options):
    """Masked scores as the only output."""

    def original(m, x):
        product = split(m.q(x), N) @ split(m.k(x), N).mT / H**0.5
        return theirs(product, torch.from_numpy(SEEN))

    def port(m, x):
        return ours(f_scaled(f_split(m.q(x), N), f_split(m.k(x), N)), jnp.asarray(SEEN))

    return pair(name, TWO, original, port, (X,), options)


def filled(name, fill, **options):
    """Scores hidden by `fill`, a function of them."""

    def original(s, seen):
        return s.masked_fill(~seen, fill(s))

    def port(s, seen):
        return jnp.where(seen, s, fill(s))

    return scores(name, original, port, **options)


def added():
    """Scores to which a fill is added."""

    def original(s, seen):
        return s + torch.where(seen, 0.0, -1e10)

    def port(s, seen):
        return s + jnp.where(seen, 0.0, -1e10)

    return scores("scores to which -1e10 is added", original, port)


def banned():
    """A head's capped logits, some tokens of them banned."""

    def original(m, x):
        logits = 5 * torch.tanh(m.head(x) / 5)
        return {"logits": logits.masked_fill(torch.from_numpy(BANNED), -1e9), "head": x.sum(-1)}

    def port(m, x):
        logits = m.head(x)
        logits = 5 * jnp.tanh(logits / 5)
        return {"logits": jnp.where(jnp.asarray(BANNED), -1e9, logits), "head": x.sum(-1)}

    return pair("tokens banned by -1e9", {"head": linear(D, 11)}, original, port, (X,))


def masked(name, fill, **options):
    """A float mask, ones and zeros, that is multiplied by a fill and added to the scores."""

    def original(m, x, mask):
        hide = (1.0 - mask) * fill(x)
        return m.o(merge(attend(*qkv(m, x, N), modify_logits=lambda s: s + hide)))

    def port(m, x, mask):
        hide = (1.0 - mask) * fill(x)
        q, k, v = f_qkv(m, x, N)
        return m.o(f_merge(f_attend(q, k, v, modify_logits=lambda s: s + hide)))

    return pair(name, projections(), original, port, {"x": X, "mask": MASK}, options)


def one_above():
    """A channel as large as no other."""

    def original(m, x):
        return m.out(x) * torch.from_numpy(GAIN).to(x.dtype)

    def port(m, x):
        y = m.out(x)
        return y * jnp.asarray(GAIN, x.dtype)

    return pair("one channel of 1e20", {"out": linear(D, D)}, original, port, (X,))


PORTS = [
    filled("scores beside finfo.min", least),
    filled("scores beside finfo.min in float32", least, dtypes=("float32",)),
    filled("scores beside -1e30", lambda s: -1e30),
    filled("scores beside -inf", lambda s: -np.inf),
    added(),
    banned(),
    masked("a float mask times -1e30", lambda x: -1e30),
    masked("a float mask times finfo.min", least),
    masked("a constant float mask", least, constants=("mask",)),
    one_above(),
]
