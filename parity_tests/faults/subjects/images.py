"""Blocks of image models: EfficientNet's MBConv, the residual block of guided diffusion."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import channels_last, normal, torch

F = torch.nn.functional


class TorchMBConv(torch.nn.Module):
    """EfficientNet's inverted bottleneck with squeeze and excitation (Tan and Le 2019)."""

    def __init__(self):
        super().__init__()
        self.expand = torch.nn.Conv2d(5, 11, 1, bias=False)
        self.bn0 = torch.nn.BatchNorm2d(11, eps=1e-3)
        self.depthwise = torch.nn.Conv2d(11, 11, 3, padding=1, groups=11, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(11, eps=1e-3)
        self.reduce, self.excite = torch.nn.Conv2d(11, 4, 1), torch.nn.Conv2d(4, 11, 1)
        self.project = torch.nn.Conv2d(11, 5, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(5, eps=1e-3)

    def forward(self, x):  # B C H W
        y = F.silu(self.bn0(self.expand(x)))
        y = F.silu(self.bn1(self.depthwise(y)))
        squeezed = F.silu(self.reduce(F.adaptive_avg_pool2d(y, 1)))
        y = y * torch.sigmoid(self.excite(squeezed))
        return x + self.bn2(self.project(y))


class MBConv(nnx.Module):
    """The same, channels last, the second norm written out and squeezed by Linears."""

    def __init__(self, *, rngs):
        self.expand = nnx.Conv(5, 11, (1, 1), use_bias=False, rngs=rngs)
        self.bn0 = nnx.BatchNorm(11, use_running_average=True, epsilon=1e-3, rngs=rngs)
        self.depthwise = nnx.Conv(
            11, 11, (3, 3), padding="SAME", feature_group_count=11, use_bias=False, rngs=rngs
        )
        self.scale, self.bias = nnx.Param(jnp.ones(11)), nnx.Param(jnp.zeros(11))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(11)), nnx.BatchStat(jnp.ones(11))
        self.reduce = nnx.Linear(11, 4, rngs=rngs)
        self.excite = nnx.Linear(4, 11, rngs=rngs)
        self.project = nnx.Conv(11, 5, (1, 1), use_bias=False, rngs=rngs)
        self.bn2 = nnx.BatchNorm(5, use_running_average=True, epsilon=1e-3, rngs=rngs)

    def __call__(self, x):  # B H W C
        y = jax.nn.silu(self.bn0(self.expand(x)))
        y = self.depthwise(y) - self.mean[...]
        y = y * jax.lax.rsqrt(self.var[...] + 1e-3) * self.scale[...] + self.bias[...]
        y = y * jax.nn.sigmoid(y)
        squeezed = jnp.mean(y, axis=(1, 2), keepdims=True)
        squeezed = self.excite(jax.nn.silu(self.reduce(squeezed)))
        y = y * jax.nn.sigmoid(squeezed)
        return x + self.bn2(self.project(y))


class TorchADM(torch.nn.Module):
    """The residual block of guided diffusion (Dhariwal and Nichol 2021) with its time steps."""

    def __init__(self):
        super().__init__()
        self.time1, self.time2 = torch.nn.Linear(8, 13), torch.nn.Linear(13, 17)
        self.in_norm = torch.nn.GroupNorm(2, 6)
        self.in_conv = torch.nn.Conv2d(6, 15, 3, padding=1)
        self.emb = torch.nn.Linear(17, 30)
        self.out_norm = torch.nn.GroupNorm(5, 15)
        self.out_conv = torch.nn.Conv2d(15, 15, 3, padding=1)
        self.skip = torch.nn.Conv2d(6, 15, 1)

    def forward(self, x, steps):  # B C H W, B
        rates = torch.exp(-math.log(10000) * torch.arange(4, dtype=x.dtype) / 4)
        angles = steps[:, None] * rates
        emb = torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)
        emb = self.time2(F.silu(self.time1(emb)))
        y = self.in_conv(F.silu(self.in_norm(x)))
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        y = self.out_norm(y) * (1 + scale) + shift
        return self.skip(x) + self.out_conv(F.silu(y))


class ADM(nnx.Module):
    """The same, channels last, the second norm written out."""

    def __init__(self, *, rngs):
        self.time1 = nnx.Linear(8, 13, rngs=rngs)
        self.time2 = nnx.Linear(13, 17, rngs=rngs)
        self.in_norm = nnx.GroupNorm(6, num_groups=2, epsilon=1e-5, rngs=rngs)
        self.in_conv = nnx.Conv(6, 15, (3, 3), padding=1, rngs=rngs)
        self.emb = nnx.Linear(17, 30, rngs=rngs)
        self.scale, self.shift = nnx.Param(jnp.ones(15)), nnx.Param(jnp.zeros(15))
        self.out_conv = nnx.Conv(15, 15, (3, 3), padding=1, rngs=rngs)
        self.skip = nnx.Conv(6, 15, (1, 1), rngs=rngs)

    def __call__(self, x, steps):  # B H W C, B
        rates = jnp.exp(-math.log(10000.0) * jnp.arange(4, dtype=x.dtype) / 4)
        angles = steps[:, None] * rates[None, :]
        emb = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        emb = self.time2(jax.nn.silu(self.time1(emb)))
        y = self.in_conv(jax.nn.silu(self.in_norm(x)))
        parts = y.reshape(*y.shape[:3], 5, 3)
        mean = jnp.mean(parts, axis=(1, 2, 4), keepdims=True)
        variance = jnp.mean((parts - mean) ** 2, axis=(1, 2, 4), keepdims=True)
        y = ((parts - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(y.shape)
        y = y * self.scale[...] + self.shift[...]
        emb = self.emb(jax.nn.silu(emb))[:, None, None, :]
        scale, shift = emb[..., :15], emb[..., 15:]
        y = y * (1.0 + scale) + shift
        return self.skip(x) + self.out_conv(jax.nn.silu(y))


PORTS = [
    Port(
        "MBConv",
        TorchMBConv,
        MBConv,
        lambda seed: (normal(seed, "mbconv", 2, 7, 9, 5),),
        (
            Rule("bn1.{weight,bias} -> {scale,bias}"),
            Rule("bn1.{running_mean,running_var} -> {mean,var}"),
            Rule("reduce.weight -> reduce.kernel", "o i 1 1 -> i o"),
            Rule("excite.weight -> excite.kernel", "o i 1 1 -> i o"),
        ),
        {"torch_call": channels_last},
    ),
    Port(
        "ADM",
        TorchADM,
        ADM,
        lambda seed: (
            normal(seed, "adm", 9, 7, 11, 6),
            10 * abs(normal(seed, "steps", 9)),
        ),
        (Rule("out_norm.{weight,bias} -> {scale,shift}"),),
        {"torch_call": channels_last},
    ),
]
