"""Rounding: what an original means, what a port does beyond it, and what it leaves out."""

import jax
import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv
from .pair import B, D, N, T, linear, normal, pair, parameter, projections, torch

X = normal("x", B, T, D)
LONG = np.abs(normal("long", 2, 300, 6))
SLOPES = 2.0 ** (-8.0 * np.arange(1, N + 1) / N)
IN_BOTH = {"dtypes": ("float64", "bfloat16"), "jit": True, "eager": False}


def alibi():
    """ALiBi rounded to bfloat16 on purpose, as Falcon has it."""

    def original(m, x):
        slopes = torch.from_numpy(SLOPES)[:, None, None]
        bias = (slopes * torch.arange(T)).to(torch.bfloat16)
        return m.o(merge(attend(*qkv(m, x, N), modify_logits=lambda s: s + bias.to(s.dtype))))

    def port(m, x):
        bias = jnp.asarray(SLOPES, x.dtype)[:, None, None] * jnp.arange(T, dtype=x.dtype)
        bias = bias.astype(jnp.bfloat16).astype(x.dtype)
        return m.o(f_merge(f_attend(*f_qkv(m, x, N), modify_logits=lambda s: s + bias)))

    return pair("ALiBi in bfloat16", projections(), original, port, (X,))


def rounded(name, narrow, f_narrow):
    """Keys kept in a narrow dtype, as a cache keeps them."""

    def original(m, x):
        q, k, v = qkv(m, x, N)
        return m.o(merge(attend(q, k.to(narrow).to(q.dtype), v)))

    def port(m, x):
        q, k, v = f_qkv(m, x, N)
        return m.o(f_merge(f_attend(q, k.astype(f_narrow).astype(k.dtype), v)))

    return pair(name, projections(), original, port, (X,), {"grads": False})


def mlp():
    """Two projections in two dtypes."""

    def original(m, x):
        return m.down(torch.relu(m.up(x)))

    def port(m, x):
        y = m.up(x)
        return m.down(jax.nn.relu(y))

    parts = {"up": linear(D, 23), "down": linear(23, D)}
    return pair("an MLP in bfloat16 too", parts, original, port, (X,), IN_BOTH)


def sums():
    """Sums over many steps, rounded at each of them."""

    def original(m, x):
        total, rows = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            total = total + x[:, t] * 0.37
            rows.append(total)
        return torch.stack(rows, 1) * m.gain

    def port(m, x):
        wide = x.dtype
        steps = jnp.swapaxes(x, 0, 1).astype(wide)

        def step(total, row):
            total = total + row * jnp.asarray(0.37, wide)
            return total, total

        _, rows = jax.lax.scan(step, jnp.zeros_like(steps[0]), steps)
        return jnp.swapaxes(rows, 0, 1).astype(x.dtype) * m.gain[...]

    options = {**IN_BOTH, "grads": False}
    return pair("sums of many steps", {"gain": parameter(6)}, original, port, (LONG,), options)


PORTS = [
    alibi(),
    rounded("keys in bfloat16", torch.bfloat16, jnp.bfloat16),
    rounded("keys in float16", torch.float16, jnp.float16),
    mlp(),
    sums(),
]
