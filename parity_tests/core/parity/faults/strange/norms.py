"""Norms that other libraries write themselves, and what may be wrong with them."""

import jax.numpy as jnp
from flax import nnx

from .fault import Strange
from .pair import B, D, Pair, Part, T, linear, normal, torch

G = "norms and rotary"
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


class Port(nnx.Module):
    """The port of one of these: `right(x, gain)` and `wrong(x, gain)`, arrays of one shape."""

    def __init__(self, share, right, wrong):
        self.share, self.right, self.wrong = share, right, wrong

    def __call__(self, *inputs):
        gain = self.gain[...]
        return self.share(self.right(*inputs, gain), self.wrong(*inputs, gain))


class PortRMSNorm(Port):
    """With its gain as nnx names it."""

    def __init__(self, share, right, wrong):
        super().__init__(share, right, wrong)
        self.scale = nnx.Param(jnp.ones(D))

    @property
    def gain(self):
        return self.scale


class PortGated(Port):
    """With its gain as torch names it."""

    def __init__(self, share, right, wrong):
        super().__init__(share, right, wrong)
        self.weight = nnx.Param(jnp.ones(D))

    @property
    def gain(self):
        return self.weight


def rms(x, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps)


def normed(theirs, right, wrong, port=PortRMSNorm, x=X):
    """A norm between two projections."""
    norm = Part(theirs, lambda rngs, share: port(share, right, wrong))
    return Pair(
        {"up": linear(D, D), "norm": norm, "out": linear(D, 9)},
        lambda m, x: m.out(m.norm(m.up(x))),
        lambda m, share, x: m.out(m.norm(m.up(x))),
        (x,),
    )


def gated(wrong):
    """The gated norm of one projection by another."""

    def right(x, gate, w):
        return rms(x * nnx.silu(gate), 1e-6) * w

    norm = Part(RMSNormGated, lambda rngs, share: PortGated(share, right, wrong))
    return Pair(
        {"up": linear(D, D), "gate": linear(D, D), "norm": norm, "out": linear(D, 9)},
        lambda m, x: m.out(m.norm(m.up(x), m.gate(x))),
        lambda m, share, x: m.out(m.norm(m.up(x), m.gate(x))),
        (X,),
    )


def _outside(x, w):
    return x / (jnp.sqrt((x**2).mean(-1, keepdims=True)) + EPS) * w


def _layer_norm(ddof):
    def norm(x, w):
        return (
            (x - x.mean(-1, keepdims=True))
            / jnp.sqrt(x.var(-1, keepdims=True, ddof=ddof) + EPS)
            * w
        )

    return norm


class BareLayerNorm(torch.nn.Module):
    """Without a bias, its variance over n - 1."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(D)), EPS

    def forward(self, x):
        gap = x - x.mean(-1, keepdim=True)
        return gap / torch.sqrt(x.var(-1, keepdim=True) + self.eps) * self.weight


class PortLayerNorm(PortRMSNorm):
    """The same, by a name that tells what it is."""


FAULTS = [
    Strange(
        "a gain w, where torch has 1 + w",
        G,
        normed(GemmaRMSNorm, lambda x, w: rms(x, EPS) * (1 + w), lambda x, w: rms(x, EPS) * w),
        "norm",
        "gain",
    ),
    Strange(
        "the epsilon of a gated norm",
        G,
        gated(lambda x, gate, w: rms(x * nnx.silu(gate), 1e-5) * w),
        "norm",
        "epsilon",
    ),
    Strange(
        "the gate behind the norm, where torch has it before",
        G,
        gated(lambda x, gate, w: rms(x, 1e-6) * w * nnx.silu(gate)),
        "norm",
    ),
    Strange(
        "epsilon inside the root, where torch has it outside",
        G,
        normed(ScaleRMSNorm, _outside, lambda x, w: rms(x, EPS) * w, x=SMALL),
        "norm",
        "epsilon|deviation|root",
    ),
    Strange(
        "the variance over n, where torch has n - 1",
        G,
        normed(BareLayerNorm, _layer_norm(1), _layer_norm(0), PortLayerNorm),
        "norm",
        "n - 1|variance|over n",
    ),
]
