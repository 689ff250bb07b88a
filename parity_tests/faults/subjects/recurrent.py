"""Blocks with a linear recurrence: RWKV's time mixing, S4D."""

import jax
import jax.numpy as jnp
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import normal, torch

F = torch.nn.functional


class TorchTimeMix(torch.nn.Module):
    """Time mixing of RWKV-4 (Peng et al. 2023), its exponents kept small by their maximum."""

    def __init__(self):
        super().__init__()
        for name in ("mix_k", "mix_v", "mix_r", "decay", "first"):
            width = 5 if name.startswith("mix") else 9
            setattr(self, name, torch.nn.Parameter(torch.rand(width)))
        self.key = torch.nn.Linear(5, 9, bias=False)
        self.value = torch.nn.Linear(5, 9, bias=False)
        self.receptance = torch.nn.Linear(5, 9, bias=False)
        self.output = torch.nn.Linear(9, 5, bias=False)

    def forward(self, x):  # B T D
        last = F.pad(x, (0, 0, 1, -1))
        k = self.key(x * self.mix_k + last * (1 - self.mix_k))
        v = self.value(x * self.mix_v + last * (1 - self.mix_v))
        r = self.receptance(x * self.mix_r + last * (1 - self.mix_r))
        top = bottom = torch.zeros_like(k[:, 0])
        peak = torch.full_like(k[:, 0], -1e38)
        outs = []
        for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
            most = torch.maximum(peak, k_t + self.first)
            e1, e2 = torch.exp(peak - most), torch.exp(k_t + self.first - most)
            outs.append((e1 * top + e2 * v_t) / (e1 * bottom + e2))
            fading = peak - torch.exp(self.decay)
            peak = torch.maximum(fading, k_t)
            e1, e2 = torch.exp(fading - peak), torch.exp(k_t - peak)
            top, bottom = e1 * top + e2 * v_t, e1 * bottom + e2
        return self.output(torch.sigmoid(r) * torch.stack(outs, dim=1))


class TimeMix(nnx.Module):
    """The same, scanned over time."""

    def __init__(self, *, rngs):
        self.mix = nnx.Param(jnp.zeros((3, 5)))
        self.decay = nnx.Param(jnp.zeros(9))
        self.first = nnx.Param(jnp.zeros(9))
        self.kvr = nnx.Param(jnp.zeros((3, 5, 9)))
        self.output = nnx.Linear(9, 5, use_bias=False, rngs=rngs)

    def __call__(self, x):  # B T D
        last = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        mix = self.mix[...][:, None, None, :]
        mixed = x * mix + last * (1.0 - mix)
        k, v, r = jnp.einsum("nbti,nio->ntbo", mixed, self.kvr[...])
        first, decay = self.first[...], jnp.exp(self.decay[...])

        def step(carry, at):
            top, bottom, peak = carry
            k_t, v_t = at
            most = jnp.maximum(peak, k_t + first)
            e1, e2 = jnp.exp(peak - most), jnp.exp(k_t + first - most)
            out = (e1 * top + e2 * v_t) / (e1 * bottom + e2)
            fading = peak - decay
            peak = jnp.maximum(fading, k_t)
            e1, e2 = jnp.exp(fading - peak), jnp.exp(k_t - peak)
            return (e1 * top + e2 * v_t, e1 * bottom + e2, peak), out

        zeros = jnp.zeros_like(k[0])
        start = (zeros, zeros, jnp.full_like(zeros, -1e38))
        _, outs = jax.lax.scan(step, start, (k, v))
        y = jax.nn.sigmoid(r) * outs
        return self.output(jnp.swapaxes(y, 0, 1))


class TorchS4D(torch.nn.Module):
    """S4D (Gu et al. 2022): a diagonal state space as a long convolution, and a gated output."""

    def __init__(self):
        super().__init__()
        self.log_dt = torch.nn.Parameter(torch.rand(5) - 4)
        self.c = torch.nn.Parameter(torch.randn(5, 7, 2))
        self.log_a_real = torch.nn.Parameter(torch.zeros(5, 7))
        self.a_imag = torch.nn.Parameter(torch.rand(5, 7))
        self.d = torch.nn.Parameter(torch.randn(5))
        self.out = torch.nn.Conv1d(5, 10, 1)

    def forward(self, u):  # B H T
        length = u.shape[-1]
        a = torch.complex(-torch.exp(self.log_a_real), self.a_imag)
        dt_a = a * torch.exp(self.log_dt)[:, None]
        c = torch.view_as_complex(self.c) * (torch.exp(dt_a) - 1) / a
        powers = dt_a[..., None] * torch.arange(length)
        kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(powers)).real
        size = 2 * length
        y = torch.fft.rfft(u, n=size) * torch.fft.rfft(kernel, n=size)
        y = torch.fft.irfft(y, n=size)[..., :length]
        y = F.gelu(y + u * self.d[:, None])
        return F.glu(self.out(y), dim=1)


class S4D(nnx.Module):
    """The same, channels last, its powers by cumulative sums."""

    def __init__(self, *, rngs):
        self.log_dt = nnx.Param(jnp.zeros(5))
        self.c = nnx.Param(jnp.zeros((5, 7, 2)))
        self.log_a_real = nnx.Param(jnp.zeros((5, 7)))
        self.a_imag = nnx.Param(jnp.zeros((5, 7)))
        self.d = nnx.Param(jnp.zeros(5))
        self.out = nnx.Linear(5, 10, rngs=rngs)

    def __call__(self, u):  # B T H
        length = u.shape[1]
        a = -jnp.exp(self.log_a_real[...]) + 1j * self.a_imag[...]
        dt_a = a * jnp.exp(self.log_dt[...])[:, None]
        c = self.c[..., 0] + 1j * self.c[..., 1]
        c = c * (jnp.exp(dt_a) - 1.0) / a
        steps = jnp.repeat(dt_a[None], length, axis=0)
        powers = jnp.cumsum(steps, axis=0) - dt_a
        kernel = 2.0 * jnp.real(jnp.einsum("hn,lhn->lh", c, jnp.exp(powers)))
        over = jnp.fft.rfft(kernel, n=2 * length, axis=0)
        y = jnp.fft.rfft(u, n=2 * length, axis=1) * over
        y = jnp.fft.irfft(y, n=2 * length, axis=1)[:, :length]
        y = jax.nn.gelu(y + u * self.d[...], approximate=False)
        y, gate = jnp.split(self.out(y), 2, axis=-1)
        return y * jax.nn.sigmoid(gate)


PORTS = [
    Port(
        "RWKV",
        TorchTimeMix,
        TimeMix,
        lambda seed: (normal(seed, "rwkv", 2, 7, 5),),
        (
            Rule("{mix_k,mix_v,mix_r} -> mix", "n d -> n d"),
            Rule("{key,value,receptance}.weight -> kvr", "n o i -> n i o"),
        ),
    ),
    Port(
        "S4D",
        TorchS4D,
        S4D,
        lambda seed: (normal(seed, "s4d", 3, 11, 5),),
        (Rule("out.weight -> out.kernel", "o i 1 -> i o"),),
        {"torch_call": lambda module, u: module(u.mT).mT},
    ),
]
