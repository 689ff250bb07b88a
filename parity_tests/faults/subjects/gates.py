"""LSTM, GRU and Mamba's mixer: torch stacks gates and parts on one axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import drawn, torch


class Direction(nnx.Module):
    """One direction of an LSTM; its gates stay stacked, as torch has them."""

    def __init__(self, inputs, width, *, rngs):
        self.width = width
        self.of_x = nnx.Linear(inputs, 4 * width, rngs=rngs)
        self.of_h = nnx.Linear(width, 4 * width, rngs=rngs)

    def __call__(self, x):  # B T I
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(self.of_x(x) + self.of_h(h), 4, axis=-1)
            c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
            h = nnx.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], self.width), x.dtype)
        last, states = jax.lax.scan(step, (start, start), x.swapaxes(0, 1))
        return states.swapaxes(0, 1), last


class LSTM(nnx.Module):
    """Both directions, which torch concatenates."""

    def __init__(self, *, rngs):
        self.forwards = Direction(5, 3, rngs=rngs)
        self.backwards = Direction(5, 3, rngs=rngs)

    def __call__(self, x):  # B T I
        ahead, (h, c) = self.forwards(x)
        back, (other_h, other_c) = self.backwards(jnp.flip(x, 1))
        states = jnp.concatenate([ahead, jnp.flip(back, 1)], -1)
        return states, (jnp.stack([h, other_h]), jnp.stack([c, other_c]))


def lstm_rules():
    rules = []
    for end, name in (("", "forwards"), ("_reverse", "backwards")):
        for side, of in (("ih", "x"), ("hh", "h")):
            rules.append(Rule(f"weight_{side}_l0{end} -> {name}.of_{of}.kernel", "o i -> i o"))
        rules.append(Rule(f"bias_ih_l0{end} -> {name}.of_x.bias"))
        rules.append(Rule(f"bias_hh_l0{end} -> {name}.of_h.bias"))
    return tuple(rules)


class Gates(nnx.Module):
    """Reset, update and new: one Linear each."""

    def __init__(self, inputs, width, *, rngs):
        self.r = nnx.Linear(inputs, width, rngs=rngs)
        self.z = nnx.Linear(inputs, width, rngs=rngs)
        self.n = nnx.Linear(inputs, width, rngs=rngs)


class GRU(nnx.Module):
    """torch.nn.GRU with its gates apart."""

    def __init__(self, *, rngs):
        self.x, self.h = Gates(6, 4, rngs=rngs), Gates(4, 4, rngs=rngs)

    def __call__(self, x):  # B T I
        def step(h, x):
            r = nnx.sigmoid(self.x.r(x) + self.h.r(h))
            z = nnx.sigmoid(self.x.z(x) + self.h.z(h))
            n = jnp.tanh(self.x.n(x) + r * self.h.n(h))
            h = (1 - z) * n + z * h
            return h, h

        start = jnp.zeros((x.shape[0], 4), x.dtype)
        last, states = jax.lax.scan(step, start, x.swapaxes(0, 1))
        return states.swapaxes(0, 1), last[None]


def gru_rules():
    layouts = {"ih": "(g o) i -> g i o", "hh": "(g o) i -> g i o"}
    rules = []
    for side, of in (("ih", "x"), ("hh", "h")):
        rules.append(Rule(f"weight_{side}_l0 -> {of}.{{r,z,n}}.kernel", layouts[side], g=3))
        rules.append(Rule(f"bias_{side}_l0 -> {of}.{{r,z,n}}.bias", "(g o) -> g o"))
    return tuple(rules)


def mamba():
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    sizes = {"hidden_size": 5, "state_size": 6, "conv_kernel": 4, "expand": 2}
    config = MambaConfig(**sizes, time_step_rank=2, num_hidden_layers=1, vocab_size=9)
    return MambaMixer(config, layer_idx=0)


def softplus(x):
    """Torch's: the identity above 20."""
    return jnp.where(x > 20, x, nnx.softplus(x))


class Mixer(nnx.Module):
    """Mamba's mixer, scanned over time."""

    def __init__(self, *, rngs):
        self.in_proj = nnx.Linear(5, 20, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(10, 10, (4,), padding=((3, 0),), feature_group_count=10, rngs=rngs)
        self.x_proj = nnx.Linear(10, 14, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(2, 10, rngs=rngs)
        self.out_proj = nnx.Linear(10, 5, use_bias=False, rngs=rngs)
        self.A_log = nnx.Param(jnp.zeros((10, 6)))
        self.D = nnx.Param(jnp.ones(10))

    def __call__(self, x):  # B T D
        x, gate = jnp.split(self.in_proj(x), 2, axis=-1)
        x = nnx.silu(self.conv1d(x))
        dt, b, c = jnp.split(self.x_proj(x), (2, 8), axis=-1)
        dt = softplus(self.dt_proj(dt))
        decay = -jnp.exp(self.A_log[...])
        kept = jnp.exp(decay * dt[..., None])  # B T I N
        new = dt[..., None] * b[:, :, None] * x[..., None]

        def step(state, at):
            kept, new, c = at
            state = kept * state + new
            return state, jnp.einsum("bin,bn->bi", state, c)

        start = jnp.zeros_like(new[:, 0])
        _, y = jax.lax.scan(step, start, [a.swapaxes(0, 1) for a in (kept, new, c)])
        y = y.swapaxes(0, 1) + self.D[...] * x
        return self.out_proj(y * nnx.silu(gate))


PORTS = [
    Port(
        "LSTM",
        lambda: torch.nn.LSTM(5, 3, batch_first=True, bidirectional=True),
        LSTM,
        drawn("lstm", (4, 7, 5)),
        lstm_rules(),
    ),
    Port(
        "GRU",
        lambda: torch.nn.GRU(6, 4, batch_first=True),
        GRU,
        drawn("gru", (2, 5, 6)),
        gru_rules(),
    ),
    Port("MambaMixer", mamba, Mixer, drawn("mamba", (3, 7, 5))),
]
