"""Attention with rotary positions, each written in another way."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from .subject import (
    Subject,
    attention_truth,
    drawn,
    free_sizes,
    grouped_sizes,
    pick,
    rotary_truth,
    takes_tokens,
)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def plain_rates(base, width):
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


class RotaryEmbedding(nn.Module):
    """Rates in a buffer, angles at each call, and `magnitude` as a factor of cos and sin."""

    def __init__(self, inv_freq, magnitude=1.0):
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.magnitude = magnitude

    def forward(self, x):
        t = torch.arange(x.shape[-2], device=x.device, dtype=x.dtype)
        emb = torch.cat([torch.einsum("i,j->ij", t, self.inv_freq)] * 2, dim=-1)
        return emb.cos() * self.magnitude, emb.sin() * self.magnitude


class HalvesAttention(nn.Module):
    def __init__(self, hidden, heads, head_dim, base, inv_freq=None, magnitude=1.0, scaling=None):
        super().__init__()
        self.hidden, self.heads, self.head_dim = hidden, heads, head_dim
        self.base, self.rope_scaling = base, scaling
        inv_freq = plain_rates(base, head_dim) if inv_freq is None else inv_freq
        self.rotary_emb = RotaryEmbedding(inv_freq, magnitude)
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, heads * head_dim)
        self.v_proj = nn.Linear(hidden, heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x):
        bsz, q_len, _ = x.size()
        query = self.q_proj(x).view(bsz, q_len, self.heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(x).view(bsz, q_len, self.heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(x).view(bsz, q_len, self.heads, self.head_dim).transpose(1, 2)
        cos, sin = self.rotary_emb(value)
        query = (query * cos) + (rotate_half(query) * sin)
        key = (key * cos) + (rotate_half(key) * sin)
        weights = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim)
        mask = torch.full((q_len, q_len), torch.finfo(weights.dtype).min, dtype=weights.dtype)
        weights = F.softmax(weights + mask.triu(diagonal=1), dim=-1)
        return self.o_proj(torch.matmul(weights, value).transpose(1, 2).reshape(bsz, q_len, -1))


def halves_truth(m):
    return attention_truth(
        m.hidden,
        m.heads,
        m.head_dim,
        biases="qkv",
        mask="CAUSAL",
        rotary=rotary_truth(m.base, m.head_dim, scaling=m.rope_scaling),
    )


def build_linear(rng):
    width, heads, head_dim = free_sizes(rng)
    base, factor = pick(rng, 10000.0, 5000.0), pick(rng, 2.0, 4.0, 8.0)
    rates = plain_rates(base, head_dim) / factor
    scaling = f"LinearScaling({factor})"
    return HalvesAttention(width, heads, head_dim, base, rates, scaling=scaling)


def build_llama3(rng):
    width, heads, head_dim = free_sizes(rng)
    base, factor, old_length = pick(rng, 10000.0, 500.0), pick(rng, 4.0, 8.0), pick(rng, 64, 256)
    rates = plain_rates(base, head_dim)
    wavelengths = 2 * math.pi / rates
    smooth = (old_length / wavelengths - 1.0) / (4.0 - 1.0)
    between = (1 - smooth) * rates / factor + smooth * rates
    long, short = wavelengths > old_length / 1.0, wavelengths < old_length / 4.0
    rates = torch.where(long, rates / factor, torch.where(short, rates, between))
    scaling = f"Llama3Scaling({factor}, {old_length}, 1.0, 4.0)"
    return HalvesAttention(width, heads, head_dim, base, rates, scaling=scaling)


def build_yarn(rng):
    width, heads, head_dim = free_sizes(rng)
    base, factor, old_length = pick(rng, 10000.0, 1000.0), pick(rng, 2.0, 4.0), pick(rng, 64, 512)

    def pair_of(rotations):
        turns = old_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_of(8.0)), 0)
    high = min(math.ceil(pair_of(1.0)), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).double() - low) / (high - low)).clamp(0, 1)
    rates = plain_rates(base, head_dim)
    rates = rates / factor * ramp + rates * (1 - ramp)
    magnitude = pick(rng, 0.1 * math.log(factor) + 1.0, 1.25)
    scaling = f"Yarn({factor}, {old_length}, 8.0, 1.0, attention_factor={magnitude!r})"
    return HalvesAttention(width, heads, head_dim, base, rates, magnitude, scaling)


class NeighbourAttention(nn.Module):
    """A part of each head is rotated in neighbours, with sin and cos side by side in a table."""

    def __init__(self, embed_dim, heads, head_dim, rotary_dim, base):
        super().__init__()
        self.embed_dim, self.heads, self.head_dim = embed_dim, heads, head_dim
        self.rotary_dim, self.base = rotary_dim, base
        self.k_proj = nn.Linear(embed_dim, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, heads * head_dim, bias=False)
        self.q_proj = nn.Linear(embed_dim, heads * head_dim, bias=False)
        self.out_proj = nn.Linear(heads * head_dim, embed_dim)
        angles = torch.outer(torch.arange(32).double(), plain_rates(base, rotary_dim))
        self.register_buffer("embed_positions", torch.cat((angles.sin(), angles.cos()), dim=1))

    def rotate(self, x):
        sin, cos = self.embed_positions[: x.shape[1]].chunk(2, dim=-1)
        sin, cos = (y.repeat_interleave(2, dim=1)[None, :, None] for y in (sin, cos))
        part, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        swapped = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        return torch.cat([part * cos + swapped * sin, rest], dim=-1)

    def forward(self, x):
        shape = (*x.shape[:-1], self.heads, self.head_dim)
        k, v, q = (f(x).view(shape) for f in (self.k_proj, self.v_proj, self.q_proj))
        k, q = self.rotate(k).permute(0, 2, 1, 3), self.rotate(q).permute(0, 2, 1, 3)
        attn = torch.matmul(q, k.transpose(-1, -2))
        row = torch.arange(x.shape[1]).unsqueeze(1)
        attn = torch.where(row >= row.T, attn, torch.finfo(attn.dtype).min)
        attn = torch.softmax(attn / self.head_dim**0.5, dim=-1)
        out = torch.matmul(attn, v.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        return self.out_proj(out.reshape(*x.shape[:-1], -1))


def build_neighbours(rng):
    width, heads, head_dim = free_sizes(rng)
    return NeighbourAttention(width, heads, head_dim, pick(rng, 2, 4, head_dim), pick(rng, 1e4, 77))


class ComplexRotary(nn.Module):
    """A complex table in a buffer, heads after the sequence, einsum over groups."""

    def __init__(self, dim, heads, kv_heads, head_dim, theta):
        super().__init__()
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        self.theta = theta
        self.wq = nn.Linear(dim, heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, dim, bias=False)
        angles = torch.outer(torch.arange(48).double(), plain_rates(theta, head_dim))
        freqs_cis = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("freqs_cis", freqs_cis, persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        freqs = self.freqs_cis[:t].view(1, t, 1, -1)
        q = torch.view_as_complex(self.wq(x).view(b, t, self.heads, -1, 2)) * freqs
        k = torch.view_as_complex(self.wk(x).view(b, t, self.kv_heads, -1, 2)) * freqs
        q = torch.view_as_real(q).reshape(b, t, self.kv_heads, -1, self.head_dim)
        k = torch.view_as_real(k).flatten(3)
        v = self.wv(x).view(b, t, self.kv_heads, self.head_dim)
        logits = torch.einsum("btkgd,bskd->bkgts", q, k) * self.head_dim**-0.5
        later = torch.ones(t, t, dtype=torch.bool).triu_(1)
        weights = logits.masked_fill_(later, -torch.inf).softmax(-1)
        return self.wo(torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2))


class AxisFreeRotary(nn.Module):
    """Bidirectional, rotates by slices written back into a new tensor; no table is kept."""

    def __init__(self, width, heads, head_dim, base):
        super().__init__()
        self.width, self.heads, self.head_dim, self.base = width, heads, head_dim, base
        self.qk = nn.Linear(width, 2 * heads * head_dim, bias=False)
        self.v, self.o = nn.Linear(width, heads * head_dim), nn.Linear(heads * head_dim, width)

    def forward(self, x):
        b, t, _ = x.shape
        half = self.head_dim // 2
        power = -torch.arange(half).to(x) / half
        theta = torch.arange(t).to(x)[:, None] * torch.exp(power * math.log(self.base))
        c, s = theta.cos()[None, None], theta.sin()[None, None]
        qk = self.qk(x).view(b, t, 2 * self.heads, self.head_dim).transpose(1, 2)
        turned = torch.empty_like(qk)
        turned[..., :half] = qk[..., :half] * c - qk[..., half:] * s
        turned[..., half:] = qk[..., :half] * s + qk[..., half:] * c
        q, k = turned.split(self.heads, dim=1)
        v = self.v(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, t, self.heads * self.head_dim))


POSITIONS = [
    Subject(
        "rotary_halves",
        drawn(lambda rng: HalvesAttention(*free_sizes(rng), pick(rng, 10000.0, 1e6, 300.0))),
        takes_tokens("hidden"),
        halves_truth,
        "rotate_half, rates in a buffer of a submodule, mask by full and triu",
    ),
    Subject(
        "rotary_linear_scaling",
        drawn(build_linear),
        takes_tokens("hidden"),
        halves_truth,
        "rates divided by a factor",
    ),
    Subject(
        "rotary_llama3_scaling",
        drawn(build_llama3),
        takes_tokens("hidden"),
        halves_truth,
        "rates by wavelength",
    ),
    Subject(
        "rotary_yarn",
        drawn(build_yarn),
        takes_tokens("hidden"),
        halves_truth,
        "rates by a ramp over pairs, cos and sin times the attention factor",
    ),
    Subject(
        "rotary_neighbours_partial",
        drawn(build_neighbours),
        takes_tokens("embed_dim"),
        lambda m: attention_truth(
            m.embed_dim,
            m.heads,
            m.head_dim,
            biases="o",
            mask="CAUSAL",
            rotary=rotary_truth(m.base, m.rotary_dim, "neighbours"),
        ),
        "every two, a part of the head, masked before the division",
    ),
    Subject(
        "rotary_complex_grouped_einsum",
        drawn(lambda rng: ComplexRotary(*grouped_sizes(rng), pick(rng, 10000.0, 50.0))),
        takes_tokens("dim"),
        lambda m: attention_truth(
            m.dim,
            m.heads,
            m.head_dim,
            kv_heads=m.kv_heads,
            mask="CAUSAL",
            rotary=rotary_truth(m.theta, m.head_dim, "neighbours"),
        ),
        "view_as_complex, queries grouped in the einsum",
    ),
    Subject(
        "rotary_bidirectional_slices",
        drawn(lambda rng: AxisFreeRotary(*free_sizes(rng), pick(rng, 10000.0, 20.0))),
        takes_tokens("width"),
        lambda m: attention_truth(
            m.width,
            m.heads,
            m.head_dim,
            biases="vo",
            rotary=rotary_truth(m.base, m.head_dim),
        ),
        "q and k in one Linear and rotated at once, v apart",
    ),
]
