"""Blocks that mix tokens without attention: MLP-Mixer and FNet."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import normal, torch

F = torch.nn.functional


class TorchMixer(torch.nn.Module):
    """A layer of MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(5, eps=1e-6)
        self.token_up, self.token_down = torch.nn.Linear(9, 14), torch.nn.Linear(14, 9)
        self.norm2 = torch.nn.LayerNorm(5, eps=1e-6)
        self.up, self.down = torch.nn.Linear(5, 17), torch.nn.Linear(17, 5)

    def forward(self, x):  # B T D
        y = self.norm1(x).transpose(1, 2)
        y = self.token_down(F.gelu(self.token_up(y)))
        x = x + y.transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mixer(nnx.Module):
    """The same, with tokens mixed by products over the axis of tokens."""

    def __init__(self, *, rngs):
        self.norm1 = nnx.LayerNorm(5, epsilon=1e-6, rngs=rngs)
        self.token_in = nnx.Param(jnp.zeros((9, 14)))
        self.token_in_bias = nnx.Param(jnp.zeros(14))
        self.token_out = nnx.Param(jnp.zeros((14, 9)))
        self.token_out_bias = nnx.Param(jnp.zeros(9))
        self.norm2 = nnx.LayerNorm(5, epsilon=1e-6, rngs=rngs)
        self.up = nnx.Linear(5, 17, rngs=rngs)
        self.down = nnx.Linear(17, 5, rngs=rngs)

    def __call__(self, x):  # B T D
        y = jnp.einsum("btd,th->bhd", self.norm1(x), self.token_in[...])
        y = y + self.token_in_bias[...][:, None]
        y = 0.5 * y * (1.0 + jax.lax.erf(y / math.sqrt(2.0)))
        y = jnp.einsum("bhd,ht->btd", y, self.token_out[...])
        x = x + y + self.token_out_bias[...][:, None]
        y = jax.nn.gelu(self.up(self.norm2(x)), approximate=False)
        return x + self.down(y)


class TorchFNet(torch.nn.Module):
    """A layer of FNet (Lee-Thorp et al. 2022): two Fourier transforms, and a feed forward."""

    def __init__(self):
        super().__init__()
        self.mix_norm = torch.nn.LayerNorm(6, eps=1e-12)
        self.up, self.down = torch.nn.Linear(6, 13), torch.nn.Linear(13, 6)
        self.norm = torch.nn.LayerNorm(6, eps=1e-12)

    def forward(self, x):  # B T D
        x = self.mix_norm(x + torch.fft.fftn(x, dim=(1, 2)).real)
        y = self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.norm(x + y)


class FNet(nnx.Module):
    """The same, its first norm and its activation written out."""

    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(6))
        self.shift = nnx.Param(jnp.zeros(6))
        self.up = nnx.Linear(6, 13, rngs=rngs)
        self.down = nnx.Linear(13, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, epsilon=1e-12, rngs=rngs)

    def __call__(self, x):  # B T D
        mixed = jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2)
        x = x + jnp.real(mixed)
        mean = jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True)
        x = (x - mean) / jnp.sqrt(variance + 1e-12)
        x = x * self.scale[...] + self.shift[...]
        y = self.up(x)
        inner = math.sqrt(2.0 / math.pi) * (y + 0.044715 * y**3)
        y = 0.5 * y * (1.0 + jnp.tanh(inner))
        return self.norm(x + self.down(y))


PORTS = [
    Port(
        "Mixer",
        TorchMixer,
        Mixer,
        lambda seed: (normal(seed, "mixer", 3, 9, 5),),
        (
            Rule("token_up.weight -> token_in", "o i -> i o"),
            Rule("token_up.bias -> token_in_bias"),
            Rule("token_down.weight -> token_out", "o i -> i o"),
            Rule("token_down.bias -> token_out_bias"),
        ),
    ),
    Port(
        "FNet",
        TorchFNet,
        FNet,
        lambda seed: (normal(seed, "fnet", 3, 7, 6),),
        (Rule("mix_norm.{weight,bias} -> {scale,shift}"),),
    ),
]
