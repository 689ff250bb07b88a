"""LSTM, GRU and Mamba's mixer: torch stacks gates and parts on one axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from .mistake import Block, Mistake, normal, torch


class Direction(nnx.Module):
    """One direction of an LSTM; its gates stay stacked, as torch has them."""

    hidden_bias = True

    def __init__(self, inputs, width, *, rngs):
        self.width = width
        self.of_x = nnx.Linear(inputs, 4 * width, rngs=rngs)
        self.of_h = nnx.Linear(width, 4 * width, use_bias=self.hidden_bias, rngs=rngs)

    def gates(self, y):
        i, f, g, o = jnp.split(y, 4, axis=-1)
        return i, f, g, o

    def __call__(self, x):  # B T I
        def step(carry, x):
            h, c = carry
            i, f, g, o = self.gates(self.of_x(x) + self.of_h(h))
            c = nnx.sigmoid(f) * c + nnx.sigmoid(i) * jnp.tanh(g)
            h = nnx.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[0], self.width), x.dtype)
        last, states = jax.lax.scan(step, (start, start), x.swapaxes(0, 1))
        return states.swapaxes(0, 1), last


class LSTM(nnx.Module):
    """Both directions, which torch concatenates."""

    Direction = Direction

    def __init__(self, *, rngs):
        self.forwards = self.Direction(5, 3, rngs=rngs)
        self.backwards = self.Direction(5, 3, rngs=rngs)

    def turned(self, states):
        return jnp.flip(states, 1)

    def __call__(self, x):  # B T I
        ahead, (h, c) = self.forwards(x)
        back, (other_h, other_c) = self.backwards(jnp.flip(x, 1))
        states = jnp.concatenate([ahead, self.turned(back)], -1)
        return states, (jnp.stack([h, other_h]), jnp.stack([c, other_c]))


def lstm_rules(bias=True):
    rules = []
    for end, name in (("", "forwards"), ("_reverse", "backwards")):
        for side, of in (("ih", "x"), ("hh", "h")):
            rules.append(Rule(f"weight_{side}_l0{end} -> {name}.of_{of}.kernel", "o i -> i o"))
        rules.append(Rule(f"bias_ih_l0{end} -> {name}.of_x.bias"))
        hidden = f"bias_hh_l0{end}"
        rules.append(Rule(f"{hidden} -> {name}.of_h.bias") if bias else Rule.skip(hidden))
    return tuple(rules)


class KerasGates(Direction):
    """Input, forget, output, new."""

    def gates(self, y):
        i, f, o, g = jnp.split(y, 4, axis=-1)
        return i, f, g, o


class OneBias(Direction):
    hidden_bias = False


class KerasLSTM(LSTM):
    Direction = KerasGates


class OneBiasLSTM(LSTM):
    Direction = OneBias


class NotTurnedLSTM(LSTM):
    def turned(self, states):
        return states


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

    def new(self, x, h, r):
        return jnp.tanh(self.x.n(x) + r * self.h.n(h))

    def mixed(self, z, n, h):
        return (1 - z) * n + z * h

    def __call__(self, x):  # B T I
        def step(h, x):
            r = nnx.sigmoid(self.x.r(x) + self.h.r(h))
            z = nnx.sigmoid(self.x.z(x) + self.h.z(h))
            h = self.mixed(z, self.new(x, h, r), h)
            return h, h

        start = jnp.zeros((x.shape[0], 4), x.dtype)
        last, states = jax.lax.scan(step, start, x.swapaxes(0, 1))
        return states.swapaxes(0, 1), last[None]


def gru_rules(hidden="(g o) i -> g i o"):
    layouts = {"ih": "(g o) i -> g i o", "hh": hidden}
    rules = []
    for side, of in (("ih", "x"), ("hh", "h")):
        rules.append(Rule(f"weight_{side}_l0 -> {of}.{{r,z,n}}.kernel", layouts[side], g=3))
        rules.append(Rule(f"bias_{side}_l0 -> {of}.{{r,z,n}}.bias", "(g o) -> g o"))
    return tuple(rules)


class ResetsBefore(GRU):
    """As the GRU was first published."""

    def new(self, x, h, r):
        return jnp.tanh(self.x.n(x) + self.h.n(r * h))


class UpdatesTheOther(GRU):
    """As the GRU was first published."""

    def mixed(self, z, n, h):
        return z * n + (1 - z) * h


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

    padding = ((3, 0),)

    def __init__(self, *, rngs):
        self.in_proj = nnx.Linear(5, 20, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(
            10, 10, (4,), padding=self.padding, feature_group_count=10, rngs=rngs
        )
        self.x_proj = nnx.Linear(10, 14, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(2, 10, rngs=rngs)
        self.out_proj = nnx.Linear(10, 5, use_bias=False, rngs=rngs)
        self.A_log = nnx.Param(jnp.zeros((10, 6)))
        self.D = nnx.Param(jnp.ones(10))

    def halves(self, y):
        x, gate = jnp.split(y, 2, axis=-1)
        return x, gate

    def decay(self):
        return -jnp.exp(self.A_log[...])

    def step_size(self, dt):
        return softplus(self.dt_proj(dt))

    def __call__(self, x):  # B T D
        x, gate = self.halves(self.in_proj(x))
        x = nnx.silu(self.conv1d(x))
        dt, b, c = jnp.split(self.x_proj(x), (2, 8), axis=-1)
        dt = self.step_size(dt)
        kept = jnp.exp(self.decay() * dt[..., None])  # B T I N
        new = dt[..., None] * b[:, :, None] * x[..., None]

        def step(state, at):
            kept, new, c = at
            state = kept * state + new
            return state, jnp.einsum("bin,bn->bi", state, c)

        start = jnp.zeros_like(new[:, 0])
        _, y = jax.lax.scan(step, start, [a.swapaxes(0, 1) for a in (kept, new, c)])
        y = y.swapaxes(0, 1) + self.D[...] * x
        return self.out_proj(y * nnx.silu(gate))


class GrowingMixer(Mixer):
    def decay(self):
        return jnp.exp(self.A_log[...])


class NoSoftplusMixer(Mixer):
    def step_size(self, dt):
        return self.dt_proj(dt)


class SameMixer(Mixer):
    padding = "SAME"


class GateFirstMixer(Mixer):
    def halves(self, y):
        gate, x = jnp.split(y, 2, axis=-1)
        return x, gate


LSTM_BLOCK = Block(
    "LSTM",
    lambda: torch.nn.LSTM(5, 3, batch_first=True, bidirectional=True),
    LSTM,
    (normal("lstm", 4, 7, 5),),
    lstm_rules(),
)
GRU_BLOCK = Block(
    "GRU",
    lambda: torch.nn.GRU(6, 4, batch_first=True),
    GRU,
    (normal("gru", 2, 5, 6),),
    gru_rules(),
)
MAMBA = Block("MambaMixer", mamba, Mixer, (normal("mamba", 3, 7, 5),))
ORDER = "order|exchang|permut|swap|gate|part"
SCAN = "between x_proj and out_proj|between dt_proj and out_proj|out_proj"
STATES, LAST = "output[0]", "output[1]|output[1][0]|output[1][1]"
MISTAKES = [
    Mistake(
        "gates as i f o g, where torch has i f g o",
        LSTM_BLOCK,
        STATES,
        ORDER,
        port=KerasLSTM,
        also=LAST,
    ),
    Mistake(
        "one of the two biases left out, because nnx's cell has one",
        LSTM_BLOCK,
        STATES,
        "bias",
        port=OneBiasLSTM,
        rules=lstm_rules(bias=False),
        also=LAST,
    ),
    Mistake(
        "the backward direction's states not reversed again",
        LSTM_BLOCK,
        STATES,
        "revers|flip|turn|mirror|order|direction|backward",
        port=NotTurnedLSTM,
    ),
    Mistake(
        "r applied before the product with h", GRU_BLOCK, STATES, "", port=ResetsBefore, also=LAST
    ),
    Mistake(
        "z and 1 - z exchanged",
        GRU_BLOCK,
        STATES,
        "1 - |exchang|swap|complement|update",
        port=UpdatesTheOther,
        also=LAST,
    ),
    Mistake(
        "the square kernels of h not transposed",
        GRU_BLOCK,
        STATES,
        "transpos",
        rules=gru_rules("(g i) o -> g i o"),
        also=LAST,
    ),
    Mistake("A without its minus sign", MAMBA, SCAN, "sign|minus|negat|-1", port=GrowingMixer),
    Mistake("dt without softplus", MAMBA, SCAN, "softplus|activation", port=NoSoftplusMixer),
    Mistake(
        "the causal convolution padded on both sides",
        MAMBA,
        "conv1d|between in_proj and x_proj",
        "pad|causal|shift|SAME|position",
        port=SameMixer,
    ),
    Mistake(
        "the gate as the first half, where torch has it as the second",
        MAMBA,
        "conv1d|between in_proj and x_proj|in_proj",
        f"{ORDER}|half|halves",
        port=GateFirstMixer,
        also=SCAN,
    ),
]
