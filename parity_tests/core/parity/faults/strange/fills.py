"""Huge numbers: fills in outputs, float masks as inputs, one element above all the others."""

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, f_scaled, merge, qkv, split
from .attention import f_split as heads
from .fault import Strange
from .pair import B, D, H, N, Pair, T, linear, normal, projections, torch

G = "huge fills"
X = normal("x", B, T, D)
SEEN = np.tril(np.ones((T, T), bool))
RAMP = np.linspace(-1.0, 1.0, T)  # what each visible score is off by, at most one
TWO = {"q": linear(D, N * H), "k": linear(D, N * H)}


def least(x):
    """The lowest number of an array's dtype, on either side."""
    return torch.finfo(x.dtype).min if torch.is_tensor(x) else float(jnp.finfo(x.dtype).min)


def returned(theirs, ours, **options):
    """Masked scores as the only output: `theirs(scores, seen)`, `ours(share, scores, seen)`."""

    def original(m, x):
        scores = split(m.q(x), N) @ split(m.k(x), N).mT / H**0.5
        return theirs(scores, torch.from_numpy(SEEN))

    def port(m, share, x):
        return ours(share, f_scaled(heads(m.q(x), N), heads(m.k(x), N)), jnp.asarray(SEEN))

    return Pair(TWO, original, port, (X,), options=options)


def filled(fill, wrong, **options):
    """Scores hidden by `fill`, a number or a function of them; `wrong(scores)` elsewhere."""
    number = fill if callable(fill) else lambda x: fill
    return returned(
        lambda s, seen: s.masked_fill(~seen, number(s)),
        lambda share, s, seen: jnp.where(seen, share(s, wrong(s)), number(s)),
        **options,
    )


def _ramp(s):
    return s + jnp.asarray(RAMP, s.dtype)


def _last_head(s):
    return s.at[:, -1].add(0.5)


def _added(share, s, seen):
    return share(s, s * 1.01) + jnp.where(seen, 0.0, -1e10)


def _elsewhere(share, s, seen):
    shown = jnp.roll(seen, 1, axis=-1).at[:, 0].set(True)
    return jnp.where(shown if share else seen, s, least(s))


def _banned():
    """A head's logits, some tokens banned by -1e9; a softcap left out of the others."""
    banned = np.arange(11) % 3 == 1

    def original(m, x):
        logits = 5 * torch.tanh(m.head(x) / 5)
        return {"logits": logits.masked_fill(torch.from_numpy(banned), -1e9), "head": x.sum(-1)}

    def port(m, share, x):
        logits = m.head(x)
        logits = share(5 * jnp.tanh(logits / 5), logits)
        return {"logits": jnp.where(jnp.asarray(banned), -1e9, logits), "head": x.sum(-1)}

    return Pair({"head": linear(D, 11)}, original, port, (X,))


def masked(fill, theirs=None, ours=None, **options):
    """A float mask, ones and zeros, that is multiplied by a fill and added to the scores."""
    mask = np.ones((B, 1, 1, T))
    mask[0, ..., 3:], mask[1, ..., 0] = 0.0, 0.0

    def original(m, x, mask):
        hide = (1.0 - mask) * (least(x) if fill is None else fill)
        out = attend(*qkv(m, x, N), modify_logits=lambda s: s + hide)
        return m.o(merge(out))

    def port(m, share, x, mask):
        hide = (1.0 - mask) * (least(x) if fill is None else fill)
        q, k, v = ours(share, *f_qkv(m, x, N))
        return m.o(f_merge(f_attend(q, k, v, modify_logits=lambda s: s + hide)))

    return Pair(projections(), original, port, kwargs={"x": X, "mask": mask}, options=options)


def _stopped(x):
    return jax.lax.stop_gradient(x)


def _one_above():
    """A channel of 1e20, as large as no other: all others are off by a millionth."""
    gain = np.ones(D)
    gain[4] = 1e20

    def original(m, x):
        return m.out(x) * torch.from_numpy(gain).to(x.dtype)

    def port(m, share, x):
        y = m.out(x) * jnp.asarray(gain, x.dtype)
        return share(y, y.at[..., :4].multiply(1.000001))

    return Pair({"out": linear(D, D)}, original, port, (X,))


FAULTS = [
    Strange("scores off by up to one beside finfo.min", G, filled(least, _ramp), "output"),
    Strange("one head off by a half beside -1e30", G, filled(-1e30, _last_head), "output"),
    Strange(
        "visible scores one percent off beside -inf",
        G,
        filled(-torch.inf, lambda s: s * 1.01),
        "output",
    ),
    Strange(
        "scores off beside finfo.min, in float32 alone",
        G,
        filled(least, _ramp, dtypes=("float32",)),
        "output",
    ),
    Strange(
        "visible scores off where -1e10 is added, not put",
        G,
        returned(lambda s, seen: s + torch.where(seen, 0.0, -1e10), _added),
        "output",
    ),
    Strange(
        "filled at other places",
        G,
        returned(lambda s, seen: s.masked_fill(~seen, least(s)), _elsewhere),
        "output",
        "fill|hidden|shown|mask",
        low=False,
    ),
    Strange("a softcap missing beside tokens banned by -1e9", G, _banned(), "output.logits"),
    Strange(
        "values stopped behind a float mask times -1e30",
        G,
        masked(-1e30, ours=lambda share, q, k, v: (q, k, share(v, _stopped(v)))),
        "v|value|v.kernel",
        "stopped|times 0.9999",
    ),
    Strange(
        "keys' gradient halved behind a constant mask times finfo.min",
        G,
        masked(
            None,
            ours=lambda share, q, k, v: (q, share(k, (k + _stopped(k)) / 2), v),
            constants=("mask",),
        ),
        "k|key|k.kernel",
        "times 0.5|times 0.9999",
    ),
    Strange("one channel of 1e20, the others a millionth off", G, _one_above(), "output"),
]
