"""Rotary positions: where their tables come from, what they turn, and by how much."""

import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv
from .fault import Strange
from .pair import B, Pair, Part, linear, normal, torch

G = "norms and rotary"
N, H, D, T, BASE = 2, 8, 11, 9, 10_000.0
X = normal("x", B, T, D)
ANGLE = "query|between q and query"


def t_turn(x, angle, factor=1.0):
    """Halves of B N T h turned by T h/2 angles."""
    cos, sin = factor * angle.cos(), factor * angle.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def t_angles(base=BASE, width=H):
    def angles(m, like):
        speed = base ** (-torch.arange(0, width, 2, dtype=like.dtype) / width)
        return torch.arange(T, dtype=like.dtype)[:, None] * speed

    return angles


def f_angles(x, base=BASE, width=H):
    speed = base ** (-jnp.arange(0, width, 2, dtype=x.dtype) / width)
    return jnp.arange(T, dtype=x.dtype)[:, None] * speed


def f_turn(x, angle, factor=1.0):
    """The same of B T N h."""
    cos, sin = (factor * f(angle)[:, None] for f in (jnp.cos, jnp.sin))
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def f_neighbours(x, angle):
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    x1, x2 = x[..., ::2], x[..., 1::2]
    return jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(x.shape)


def t_neighbours(x, angle):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def turned(theirs, right, wrong, **parts):
    """Attention over turned queries and keys: `theirs(m, x)`, `right(x)` and `wrong(x)`."""

    def original(m, x):
        q, k, v = qkv(m, x, N)
        return m.o(merge(attend(theirs(m, q), theirs(m, k), v)))

    def port(m, share, x):
        q, k, v = f_qkv(m, x, N)
        q, k = (share(right(y), wrong(y)) for y in (q, k))
        return m.o(f_merge(f_attend(q, k, v)))

    wide = N * H
    every = {name: linear(D, wide) for name in "qkv"} | {"o": linear(wide, D)} | parts
    return Pair(every, original, port, (X,))


def based(base):
    return lambda x: f_turn(x, f_angles(x, base))


def part_of(width):
    """The first `width` numbers of each head rotated, the others left."""

    def theirs(m, x):
        angle = t_angles(width=width)(m, x)
        return torch.cat([t_turn(x[..., :width], angle), x[..., width:]], dim=-1)

    def ours(x):
        done = f_turn(x[..., :width], f_angles(x, width=width))
        return jnp.concatenate([done, x[..., width:]], axis=-1)

    return theirs, ours


# As a constructor makes it: in float32, and moved to float64 with the module.
SPEED = np.float32(1.0) / np.power(np.float32(BASE), np.arange(0, H, 2, dtype=np.float32) / H)
BUFFER = Part(lambda: torch.from_numpy(SPEED.copy()), lambda rngs, share: None)


def _by_buffer(m, x):
    return t_turn(x, torch.arange(T, dtype=x.dtype)[:, None] * m.inv_freq.to(x.dtype))


def _by_constant(x):
    speed = jnp.asarray(SPEED.astype(np.float64), x.dtype)
    return f_turn(x, jnp.arange(T, dtype=x.dtype)[:, None] * speed)


def by_base(base):
    return lambda m, x: t_turn(x, t_angles(base)(m, x))


def _f_rms(x, axes):
    return x / jnp.sqrt((x**2).mean(axes, keepdims=True) + 1e-6)


PART = part_of(4)
FAULTS = [
    Strange(
        "tables in float64, where torch built a float32 buffer",
        G,
        turned(_by_buffer, _by_constant, based(BASE), inv_freq=BUFFER),
        ANGLE,
        "float32",
        low=False,
    ),
    Strange(
        "a base of 10,000 for 500,000",
        G,
        turned(by_base(5e5), based(5e5), based(BASE)),
        ANGLE,
        "10000|1e+04|base",
    ),
    Strange(
        "a base that nobody uses",
        G,
        turned(by_base(BASE), based(BASE), based(123_456.0)),
        ANGLE,
        "123456|1.23|base",
    ),
    Strange(
        "six numbers of each head rotated, not four",
        G,
        turned(PART[0], PART[1], part_of(6)[1]),
        ANGLE,
        "width|part",
    ),
    Strange(
        "all of each head rotated, where torch rotates half",
        G,
        turned(PART[0], PART[1], based(BASE)),
        ANGLE,
        "width|part|whole",
    ),
    Strange(
        "halves turned, where torch rotates neighbours",
        G,
        turned(
            lambda m, x: t_neighbours(x, t_angles()(m, x)),
            lambda x: f_neighbours(x, f_angles(x)),
            based(BASE),
        ),
        ANGLE,
        "neighbours",
    ),
    Strange(
        "the attention factor of cosine and sine left out",
        G,
        turned(
            lambda m, x: t_turn(x, t_angles()(m, x), 1.2),
            lambda x: f_turn(x, f_angles(x), 1.2),
            based(BASE),
        ),
        ANGLE,
        "factor|scale",
    ),
    Strange(
        "queries and keys normed over all heads, not over each",
        G,
        turned(
            lambda m, x: torch.nn.functional.rms_norm(x, (H,), eps=1e-6),
            lambda x: _f_rms(x, -1),
            lambda x: _f_rms(x, (-1, -2)),
        ),
        ANGLE,
    ),
]
