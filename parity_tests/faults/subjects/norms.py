"""Norms that other libraries write themselves, and what may be wrong with them."""

import jax.numpy as jnp
from flax import nnx

from .pair import B, D, Part, T, linear, normal, pair, torch

X, SMALL = normal("x", B, T, D), 0.02 * normal("small", B, T, D)
EPS = 1e-5


class GemmaRMSNorm(torch.nn.Module):
    """Gain 1 + w."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(D)), EPS

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class RMSNormGated(torch.nn.Module):
    """The norm of x times the SiLU of a gate, with a gain."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(D)), 1e-6

    def forward(self, x, gate):
        x = x * torch.nn.functional.silu(gate)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


class ScaleRMSNorm(torch.nn.Module):
    """Divides by the root plus epsilon, as x-transformers' older norms."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(D)), EPS

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class BareLayerNorm(torch.nn.Module):
    """Without a bias, its variance over n - 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(D)), EPS

    def forward(self, x):
        gap = x - x.mean(-1, keepdim=True)
        return gap / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


def rms(x, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps)


class PortRMSNorm(nnx.Module):
    """A port, its gain as nnx names it."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(D))


class PortGemmaRMSNorm(PortRMSNorm):
    def __call__(self, x):
        w = self.scale[...]
        return rms(x, EPS) * (1 + w)


class PortScaleRMSNorm(PortRMSNorm):
    def __call__(self, x):
        w = self.scale[...]
        return x / (jnp.sqrt((x**2).mean(-1, keepdims=True)) + EPS) * w


class PortLayerNorm(PortRMSNorm):
    def __call__(self, x):
        w, gap = self.scale[...], x - x.mean(-1, keepdims=True)
        return gap / jnp.sqrt(x.var(-1, keepdims=True, ddof=1) + EPS) * w


class PortGated(nnx.Module):
    """A port, its gain as torch names it."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(D))

    def __call__(self, x, gate):
        w = self.weight[...]
        return rms(x * nnx.silu(gate), 1e-6) * w


def normed(name, theirs, ours, x=X):
    """A norm between two projections."""

    def run(m, x):
        return m.out(m.norm(m.up(x)))

    parts = {"up": linear(D, D), "norm": Part(theirs, ours), "out": linear(D, 9)}
    return pair(name, parts, run, run, (x,))


def gated():
    """The gated norm of one projection by another."""

    def run(m, x):
        return m.out(m.norm(m.up(x), m.gate(x)))

    norm = Part(RMSNormGated, PortGated)
    parts = {"up": linear(D, D), "gate": linear(D, D), "norm": norm, "out": linear(D, 9)}
    return pair("a gated RMS norm", parts, run, run, (X,))


PORTS = [
    normed("an RMS norm with a gain of 1 + w", GemmaRMSNorm, PortGemmaRMSNorm),
    normed("an RMS norm with epsilon outside", ScaleRMSNorm, PortScaleRMSNorm, SMALL),
    normed("a LayerNorm over n - 1", BareLayerNorm, PortLayerNorm),
    gated(),
]
