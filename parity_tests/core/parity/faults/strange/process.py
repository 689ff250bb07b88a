"""Rounding: what an original means, what a port does beyond it, and what it leaves out."""

import jax.numpy as jnp
import numpy as np

from .attention import attend, f_attend, f_merge, f_qkv, merge, qkv
from .fault import Strange
from .pair import B, D, N, Pair, T, linear, normal, projections, torch

G = "process"
X = normal("x", B, T, D)
LONG = np.abs(normal("long", 2, 300, 6))
SLOPES = 2.0 ** (-8.0 * np.arange(1, N + 1) / N)
BOTH = ("float64", "bfloat16")


def _alibi():
    """ALiBi rounded to bfloat16 on purpose, as Falcon has it; the port does not round."""

    def original(m, x):
        slopes = torch.from_numpy(SLOPES)[:, None, None]
        bias = (slopes * torch.arange(T)).to(torch.bfloat16)
        return m.o(merge(attend(*qkv(m, x, N), modify_logits=lambda s: s + bias.to(s.dtype))))

    def port(m, share, x):
        bias = jnp.asarray(SLOPES, x.dtype)[:, None, None] * jnp.arange(T, dtype=x.dtype)
        bias = share(bias.astype(jnp.bfloat16).astype(x.dtype), bias)
        return m.o(f_merge(f_attend(*f_qkv(m, x, N), modify_logits=lambda s: s + bias)))

    return Pair(projections(), original, port, (X,))


def rounded(narrow, f_narrow, f_wrong):
    """Keys kept in a narrow dtype, as a cache keeps them; the port keeps them in another."""

    def original(m, x):
        q, k, v = qkv(m, x, N)
        return m.o(merge(attend(q, k.to(narrow).to(q.dtype), v)))

    def port(m, share, x):
        q, k, v = f_qkv(m, x, N)
        k = share(*(k.astype(dtype).astype(k.dtype) for dtype in (f_narrow, f_wrong)))
        return m.o(f_merge(f_attend(q, k, v)))

    return Pair(projections(), original, port, (X,), options={"grads": False})


def _pinned():
    """A projection that computes in float32 where all else is in bfloat16."""

    def original(m, x):
        return m.down(torch.relu(m.up(x)))

    def port(m, share, x):
        y = m.up(x)
        if share:
            up = m.up
            wide = jnp.promote_types(x.dtype, jnp.float32)
            kernel, bias = (w[...].astype(wide) for w in (up.kernel, up.bias))
            y = (x.astype(wide) @ kernel + bias).astype(x.dtype)
        return m.down(jnp.maximum(y, 0))

    parts = {"up": linear(D, 23), "down": linear(23, D)}
    return Pair(parts, original, port, (X,), options={"dtypes": BOTH, "jit": True, "eager": False})


def _sums():
    """Sums over many steps, which torch rounds at each of them and the port at the end."""

    def original(m, x):
        total, rows = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            total = total + x[:, t] * 0.37
            rows.append(total)
        return torch.stack(rows, 1) * m.gain

    def port(m, share, x):
        wide = jnp.promote_types(x.dtype, jnp.float32) if share else x.dtype
        steps = jnp.swapaxes(x, 0, 1).astype(wide)

        def step(total, row):
            total = total + row * jnp.asarray(0.37, wide)
            return total, total

        from jax.lax import scan

        _, rows = scan(step, jnp.zeros_like(steps[0]), steps)
        return jnp.swapaxes(rows, 0, 1).astype(x.dtype) * m.gain[...]

    from .pair import parameter

    return Pair(
        {"gain": parameter(6)},
        original,
        port,
        (LONG,),
        options={"dtypes": BOTH, "jit": True, "eager": False, "grads": False},
    )


FAULTS = [
    Strange(
        "a rounding to bfloat16 that the original means",
        G,
        _alibi(),
        "scores",
        "bfloat16",
        low=False,
    ),
    Strange(
        "keys kept in float16 for bfloat16",
        G,
        rounded(torch.bfloat16, jnp.bfloat16, jnp.float16),
        "key|between k and key",
        "float16",
        low=False,
    ),
    Strange(
        "keys not rounded to float16 as a cache would",
        G,
        rounded(torch.float16, jnp.float16, jnp.float64),
        "key|between k and key",
        "float16",
        low=False,
    ),
    Strange(
        "a projection in float32 amid bfloat16",
        G,
        _pinned(),
        "up|port",
        "float32",
        low=False,
        noted=True,
    ),
    Strange(
        "sums kept in float32 where torch rounds each step",
        G,
        _sums(),
        "whole run|output",
        "0.3|ratio|round|better",
        low=False,
        noted=True,
    ),
]
