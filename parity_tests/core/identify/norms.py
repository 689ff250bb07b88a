"""Attention with norms of q and k."""

import torch
from torch import nn
from torch.nn import functional as F

from .subject import (
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    free_sizes,
    grouped_sizes,
    norm_truth,
    pick,
    rotary_truth,
    takes_tokens,
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class OffsetRMSNorm(nn.Module):
    """Its weight starts at zero, and the gain is one more."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1.0 + self.weight)


def rope(x, base):
    """x is `B N T H`, rotated in halves."""
    width, length = x.shape[-1], x.shape[-2]
    rates = base ** -(torch.arange(0, width, 2).to(x) / width)
    angles = torch.arange(length).to(x)[:, None] * rates
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class HeadNormAttention(nn.Module):
    """An RMS norm of each head, before the rotation or after it."""

    def __init__(self, hidden, heads, kv_heads, head_dim, eps, norm_last):
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.eps, self.norm_last, self.base = eps, norm_last, 10000.0
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps), RMSNorm(head_dim, eps)

    def forward(self, x):
        shape = (*x.shape[:2], -1, self.head_dim)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        if self.norm_last:
            q = self.q_norm(rope(q.transpose(1, 2), self.base))
            k = self.k_norm(rope(k.transpose(1, 2), self.base))
        else:
            q = rope(self.q_norm(q).transpose(1, 2), self.base)
            k = rope(self.k_norm(k).transpose(1, 2), self.base)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(*x.shape[:2], -1))


def head_norm_truth(m):
    norm = norm_truth("rms", m.eps, after_rotary=m.norm_last)
    return attention_truth(
        m.hidden,
        m.heads,
        m.head_dim,
        kv_heads=m.kv_heads,
        mask="CAUSAL",
        q_norm=norm,
        k_norm=norm,
        rotary=rotary_truth(m.base, m.head_dim),
    )


class WholeNormAttention(nn.Module):
    """The norm comes before the split into heads."""

    def __init__(self, width, heads, head_dim, eps):
        super().__init__()
        self.width, self.heads, self.head_dim, self.eps = width, heads, head_dim, eps
        self.w_q, self.w_k = nn.Linear(width, heads * head_dim), nn.Linear(width, heads * head_dim)
        self.w_v, self.w_out = (
            nn.Linear(width, heads * head_dim),
            nn.Linear(heads * head_dim, width),
        )
        self.norm_q = nn.RMSNorm(heads * head_dim, eps=eps)
        self.norm_k = nn.RMSNorm(heads * head_dim, eps=eps)

    def forward(self, x):
        q, k, v = self.norm_q(self.w_q(x)), self.norm_k(self.w_k(x)), self.w_v(x)
        q, k, v = (y.view(*y.shape[:2], self.heads, -1).transpose(1, 2) for y in (q, k, v))
        q, k = rope(q, 10000.0), rope(k, 10000.0)
        logits = q.mul(self.head_dim**-0.5).matmul(k.mT)
        logits.masked_fill_(torch.ones_like(logits).tril().logical_not(), -1e9)
        return self.w_out(logits.softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class OffsetNormAttention(nn.Module):
    """Gains of 1 + w, a scale from the config, and in some a softcap or a sliding window."""

    def __init__(self, hidden, heads, kv_heads, head_dim, scalar, softcap, window):
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.scaling, self.softcap, self.window = scalar**-0.5, softcap, window
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = OffsetRMSNorm(head_dim, 1e-6), OffsetRMSNorm(head_dim, 1e-6)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, -1).transpose(1, 2))
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, -1).transpose(1, 2))
        v = self.v_proj(x).view(b, t, self.kv_heads, -1).transpose(1, 2)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (rope(k, 1e4), v))
        weights = rope(q, 1e4) @ k.transpose(2, 3) * self.scaling
        if self.softcap is not None:
            weights = torch.tanh(weights / self.softcap) * self.softcap
        i = torch.arange(t)
        visible = i <= i[:, None]
        if self.window is not None:
            visible = visible & (i > i[:, None] - self.window)
        mask = torch.zeros(t, t, dtype=x.dtype).masked_fill(~visible, torch.finfo(x.dtype).min)
        weights = weights + mask
        return self.o_proj((weights.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))


def build_offset(rng):
    cap, window = pick(rng, None, 1.0, 2.0), pick(rng, None, 3, 4)
    return OffsetNormAttention(*grouped_sizes(rng), pick(rng, 9.0, 25.0), cap, window)


def offset_truth(m):
    norm = norm_truth("rms", 1e-6, gain="1 + w")
    return attention_truth(
        m.hidden,
        m.heads,
        m.head_dim,
        kv_heads=m.kv_heads,
        scale=m.scaling,
        softcap=m.softcap,
        mask="CAUSAL" if m.window is None else f"CAUSAL & Window({m.window - 1}, 0)",
        q_norm=norm,
        k_norm=norm,
        rotary=rotary_truth(10000.0, m.head_dim),
    )


class UnitAttention(nn.Module):
    """Vectors divided by their lengths, and a constant factor of the logits."""

    def __init__(self, dim, heads, dim_head, factor):
        super().__init__()
        self.dim, self.heads, self.dim_head, self.factor = dim, heads, dim_head, factor
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.to_q, self.to_k, self.to_v))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        sim = torch.einsum("b i h d, b j h d -> b h i j", q, k) * self.factor
        out = torch.einsum("b h i j, b j h d -> b i h d", sim.softmax(dim=-1), v)
        return self.to_out(out.flatten(2))


class LayerNormHeads(nn.Module):
    """LayerNorm of each head without gain, of q alone or of both."""

    def __init__(self, d, n, h, both):
        super().__init__()
        self.d, self.n, self.h, self.both = d, n, h, both
        self.q, self.k = nn.Linear(d, n * h), nn.Linear(d, n * h)
        self.v, self.o = nn.Linear(d, n * h), nn.Linear(n * h, d)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.n, self.h)).transpose(1, 2) for f in self.projections())
        q = F.layer_norm(q, (self.h,), eps=1e-5)
        k = F.layer_norm(k, (self.h,), eps=1e-5) if self.both else k
        p = torch.softmax(q @ k.mT / self.h**0.5, -1)
        return self.o((p @ v).transpose(1, 2).flatten(2))

    def projections(self):
        return self.q, self.k, self.v


def unscaled_norms_truth(m):
    norm = norm_truth("layer", 1e-5, gain=None)
    return attention_truth(
        m.d, m.n, m.h, biases="qkvo", q_norm=norm, k_norm=norm if m.both else None
    )


class BlockAttention(nn.Module):
    """Norm, attention and residual in one module, the causal mask by -inf from a buffer."""

    def __init__(self, dim, heads, residual):
        super().__init__()
        self.dim, self.heads, self.residual = dim, heads, residual
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.register_buffer("mask", torch.full((32, 32), -torch.inf).triu(1), persistent=False)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * (d // self.heads) ** -0.5
        attn = (dots + self.mask[:n, :n]).softmax(dim=-1)
        out = self.to_out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, d))
        return x + out if self.residual else out


def build_block(rng):
    heads, head_dim = even_sizes(rng)
    return BlockAttention(heads * head_dim, heads, pick(rng, True, False))


NORMS = [
    Subject(
        "norm_of_heads_before_rotary",
        drawn(lambda rng: HeadNormAttention(*grouped_sizes(rng), pick(rng, 1e-6, 1e-2), False)),
        takes_tokens("hidden"),
        head_norm_truth,
        "RMS of each head, then the rotation",
    ),
    Subject(
        "norm_of_heads_after_rotary",
        drawn(lambda rng: HeadNormAttention(*grouped_sizes(rng), pick(rng, 1e-5, 1e-2), True)),
        takes_tokens("hidden"),
        head_norm_truth,
        "the rotation, then RMS of each head with its gain",
    ),
    Subject(
        "norm_over_heads",
        drawn(lambda rng: WholeNormAttention(*free_sizes(rng), pick(rng, 1e-5, 1e-3))),
        takes_tokens("width"),
        lambda m: attention_truth(
            m.width,
            m.heads,
            m.head_dim,
            biases="qkvo",
            mask="CAUSAL",
            q_norm=norm_truth("rms", m.eps, over_heads=True),
            k_norm=norm_truth("rms", m.eps, over_heads=True),
            rotary=rotary_truth(10000.0, m.head_dim),
        ),
        "nn.RMSNorm over all heads together, then the rotation",
    ),
    Subject(
        "norm_gain_one_more",
        drawn(build_offset),
        takes_tokens("hidden"),
        offset_truth,
        "gains of 1 + w, scale from a constant, softcap and window in some",
    ),
    Subject(
        "norm_unit_vectors",
        drawn(lambda rng: UnitAttention(*free_sizes(rng), pick(rng, 5.0, 10.0))),
        takes_tokens("dim"),
        lambda m: attention_truth(
            m.dim,
            m.heads,
            m.dim_head,
            scale=m.factor / m.dim_head,
            q_norm=norm_truth("rms", 0.0, gain=None),
            k_norm=norm_truth("rms", 0.0, gain=None),
        ),
        "F.normalize and a constant factor",
    ),
    Subject(
        "norm_without_gain",
        drawn(lambda rng: LayerNormHeads(*free_sizes(rng), pick(rng, True, False))),
        takes_tokens("d"),
        unscaled_norms_truth,
        "F.layer_norm without gain, of q alone in some",
    ),
    Subject(
        "block_with_norm_and_residual",
        drawn(build_block),
        takes_tokens("dim"),
        lambda m: attention_truth(
            m.dim,
            m.heads,
            m.dim // m.heads,
            mask="CAUSAL",
            pre_norm=True,
            residual=m.residual,
        ),
        "LayerNorm first, residual in some",
    ),
]
