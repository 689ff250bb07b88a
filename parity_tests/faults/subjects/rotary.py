"""Rotary positions: where their tables come from, what they turn, and by how much."""

import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv
from .pair import B, Part, linear, normal, pair, torch

N, H, D, T = 2, 8, 11, 9
BASE, FACTOR, WIDTH = 10_000.0, 1.2, 4
X = normal("x", B, T, D)

# As a constructor makes it: in float32, and moved to float64 with the module.
SPEED = np.float32(1.0) / np.power(np.float32(BASE), np.arange(0, H, 2, dtype=np.float32) / H)


def t_turn(x, angle, factor=1.0):
    """Halves of B N T h turned by T h/2 angles."""
    cos, sin = factor * angle.cos(), factor * angle.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def t_angles(x, base=BASE, width=H):
    speed = base ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    return torch.arange(T, dtype=x.dtype)[:, None] * speed


def t_neighbours(x, angle):
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def t_part(x):
    turned = t_turn(x[..., :WIDTH], t_angles(x, width=WIDTH))
    return torch.cat([turned, x[..., WIDTH:]], dim=-1)


def f_turn(x, angle, factor=1.0):
    """The same of B T N h."""
    cos, sin = factor * jnp.cos(angle)[:, None], factor * jnp.sin(angle)[:, None]
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def f_angles(x, base=BASE, width=H):
    speed = base ** (-jnp.arange(0, width, 2, dtype=x.dtype) / width)
    return jnp.arange(T, dtype=x.dtype)[:, None] * speed


def rotated(x):
    angle = f_angles(x)
    return f_turn(x, angle)


def far(x):
    return f_turn(x, f_angles(x, 5e5))


def by_table(x):
    speed = jnp.asarray(SPEED.astype(np.float64), x.dtype)
    return f_turn(x, jnp.arange(T, dtype=x.dtype)[:, None] * speed)


def in_part(x):
    """The first numbers of each head rotated, the others left."""
    turned = f_turn(x[..., :WIDTH], f_angles(x, width=WIDTH))
    return jnp.concatenate([turned, x[..., WIDTH:]], axis=-1)


def neighbours(x):
    angle = f_angles(x)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    x1, x2 = x[..., ::2], x[..., 1::2]
    return jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(x.shape)


def stretched(x):
    return f_turn(x, f_angles(x), FACTOR)


def normed(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def attention(name, theirs, ours, **parts):
    """Attention over turned queries and keys, `theirs(m, x)` and `ours(x)` of each."""

    def original(m, x):
        q, k, v = qkv(m, x, N)
        return m.o(merge(attend(theirs(m, q), theirs(m, k), v)))

    def port(m, x):
        q, k, v = f_qkv(m, x, N)
        return m.o(f_merge(f_attend(ours(q), ours(k), v)))

    wide = N * H
    every = {name: linear(D, wide) for name in "qkv"} | {"o": linear(wide, D)} | parts
    return pair(name, every, original, port, (X,))


PORTS = [
    attention("rotary attention", lambda m, x: t_turn(x, t_angles(x)), rotated),
    attention("rotary attention of base 500,000", lambda m, x: t_turn(x, t_angles(x, 5e5)), far),
    attention(
        "rotary attention by a buffer",
        lambda m, x: t_turn(x, torch.arange(T, dtype=x.dtype)[:, None] * m.inv_freq.to(x.dtype)),
        by_table,
        inv_freq=Part(lambda: torch.from_numpy(SPEED.copy()), lambda rngs: None),
    ),
    attention("rotary attention in part", lambda m, x: t_part(x), in_part),
    attention(
        "rotary attention of neighbours",
        lambda m, x: t_neighbours(x, t_angles(x)),
        neighbours,
    ),
    attention(
        "rotary attention with a factor",
        lambda m, x: t_turn(x, t_angles(x), FACTOR),
        stretched,
    ),
    attention(
        "attention over normed heads",
        lambda m, x: torch.nn.functional.rms_norm(x, (H,), eps=1e-6),
        normed,
    ),
]
