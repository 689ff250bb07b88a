"""Blocks of speech models: Conformer and DiffWave."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import normal, torch

F = torch.nn.functional


class TorchConformer(torch.nn.Module):
    """Half a feed forward and the convolution module of Conformer (Gulati et al. 2020)."""

    def __init__(self):
        super().__init__()
        self.ff_norm, self.conv_norm = torch.nn.LayerNorm(7), torch.nn.LayerNorm(7)
        self.up, self.down = torch.nn.Linear(7, 13), torch.nn.Linear(13, 7)
        self.pointwise = torch.nn.Conv1d(7, 14, 1)
        self.depthwise = torch.nn.Conv1d(7, 7, 5, padding=2, groups=7)
        self.batch_norm = torch.nn.BatchNorm1d(7)
        self.out = torch.nn.Conv1d(7, 7, 1)
        self.ff_drop, self.conv_drop = torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)

    def forward(self, x):  # B T D
        y = self.down(F.silu(self.up(self.ff_norm(x))))
        x = x + 0.5 * self.ff_drop(y)
        y = F.glu(self.pointwise(self.conv_norm(x).mT), dim=1)
        y = F.silu(self.batch_norm(self.depthwise(y)))
        return x + self.conv_drop(self.out(y).mT)


class Conformer(nnx.Module):
    """The same, channels last, with a Linear for each pointwise convolution."""

    def __init__(self, *, rngs):
        self.ff_norm = nnx.LayerNorm(7, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(7, 13, rngs=rngs)
        self.down = nnx.Linear(13, 7, rngs=rngs)
        self.ff_drop = nnx.Dropout(0.1, rngs=rngs)
        self.conv_norm = nnx.LayerNorm(7, epsilon=1e-5, rngs=rngs)
        self.pointwise = nnx.Linear(7, 14, rngs=rngs)
        self.depthwise = nnx.Conv(
            7, 7, (5,), padding=((2, 2),), feature_group_count=7, use_bias=True, rngs=rngs
        )
        self.batch_norm = nnx.BatchNorm(7, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.out = nnx.Linear(7, 7, rngs=rngs)
        self.conv_drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):  # B T D
        y = self.up(self.ff_norm(x))
        y = self.down(y * jax.nn.sigmoid(y))
        x = x + 0.5 * self.ff_drop(y)
        y, gate = jnp.split(self.pointwise(self.conv_norm(x)), 2, axis=-1)
        y = self.batch_norm(self.depthwise(y * jax.nn.sigmoid(gate)))
        y = self.out(jax.nn.silu(y))
        return x + self.conv_drop(y)


class TorchDiffWave(torch.nn.Module):
    """The residual layer of DiffWave (Kong et al. 2021) with its conditioner."""

    def __init__(self):
        super().__init__()
        self.dilated = torch.nn.Conv1d(6, 12, 3, padding=4, dilation=4)
        self.of_step = torch.nn.Linear(9, 6)
        self.of_mel = torch.nn.Conv1d(5, 12, 1)
        self.out = torch.nn.Conv1d(6, 12, 1)

    def forward(self, x, step, mel):  # B C T, B E, B M T
        y = x + self.of_step(step)[:, :, None]
        gate, kept = (self.dilated(y) + self.of_mel(mel)).chunk(2, dim=1)
        y = self.out(torch.sigmoid(gate) * torch.tanh(kept))
        residual, skip = y.chunk(2, dim=1)
        return (x + residual) / 2**0.5, skip


class DiffWave(nnx.Module):
    """The same, channels last, with the dilated convolution as a sum over its three rows."""

    def __init__(self, *, rngs):
        self.kernel = nnx.Param(jnp.zeros((3, 6, 12)))
        self.bias = nnx.Param(jnp.zeros(12))
        self.of_step = nnx.Linear(9, 6, rngs=rngs)
        self.of_mel = nnx.Linear(5, 12, rngs=rngs)
        self.out = nnx.Conv(6, 12, kernel_size=(1,), rngs=rngs)

    def __call__(self, x, step, mel):  # B T C, B E, B T M
        length = x.shape[1]
        y = x + jnp.expand_dims(self.of_step(step), axis=1)
        y = jnp.pad(y, ((0, 0), (4, 4), (0, 0)))
        rows = [y[:, 4 * k : 4 * k + length] for k in range(3)]
        y = jnp.einsum("kbtc,kco->bto", jnp.stack(rows, axis=0), self.kernel[...])
        y = y + self.bias[...] + self.of_mel(mel)
        gate, kept = jnp.split(y, 2, axis=-1)
        y = self.out(jax.nn.sigmoid(gate) * jnp.tanh(kept))
        residual, skip = jnp.split(y, 2, axis=-1)
        return (x + residual) / jnp.sqrt(2.0), skip


def wave_call(module, x, step, mel):
    out, skip = module(x.mT, step, mel.mT)
    return out.mT, skip.mT


PORTS = [
    Port(
        "Conformer",
        TorchConformer,
        Conformer,
        lambda seed: (normal(seed, "conformer", 3, 11, 7),),
        (
            Rule("pointwise.weight -> pointwise.kernel", "o i 1 -> i o"),
            Rule("out.weight -> out.kernel", "o i 1 -> i o"),
        ),
        {"train": True},
    ),
    Port(
        "DiffWave",
        TorchDiffWave,
        DiffWave,
        lambda seed: (
            normal(seed, "wave", 2, 17, 6),
            normal(seed, "step", 2, 9),
            normal(seed, "mel", 2, 17, 5),
        ),
        (
            Rule("dilated.weight -> kernel", "o i k -> k i o"),
            Rule("dilated.bias -> bias"),
            Rule("of_mel.weight -> of_mel.kernel", "o i 1 -> i o"),
        ),
        {"torch_call": wave_call},
    ),
]
