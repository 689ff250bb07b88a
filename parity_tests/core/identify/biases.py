"""Attention with biases by distance: ALiBi and T5's buckets."""

import math

import torch
from torch import nn

from .subject import Subject, attention_truth, drawn, free_sizes, pick, takes_tokens


class AlibiKeys(nn.Module):
    """Slopes times positions of keys alone, which softmax cannot tell from distances."""

    def __init__(self, width, heads, head_dim):
        super().__init__()
        self.width, self.heads, self.head_dim = width, heads, head_dim
        self.query_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.key_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.value_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.out_proj = nn.Linear(heads * head_dim, width, bias=False)
        start = 2 ** -(2 ** -(math.log2(heads) - 3))
        slopes = torch.tensor([start ** (i + 1) for i in range(heads)], dtype=torch.float64)
        self.register_buffer("slopes", slopes.view(1, heads, 1, 1))

    def forward(self, x):
        t = x.shape[1]
        q = self.query_proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k = self.key_proj(x).unflatten(2, (self.heads, -1)).permute(0, 2, 3, 1)
        v = self.value_proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        a = q @ k / math.sqrt(self.head_dim) + self.slopes * torch.arange(t)
        a = a + torch.triu(torch.full((t, t), -torch.inf, dtype=x.dtype), 1)
        return self.out_proj((a.softmax(-1) @ v).transpose(1, 2).flatten(2))


class AlibiDistances(nn.Module):
    """Any number of heads; both directions, or only the past."""

    def __init__(self, dim, n_heads, head_dim, causal):
        super().__init__()
        self.dim, self.n_heads, self.head_dim, self.causal = dim, n_heads, head_dim, causal
        self.to_qkv = nn.Linear(dim, 3 * n_heads * head_dim)
        self.to_out = nn.Linear(n_heads * head_dim, dim)

    def slopes(self):
        closest = 2 ** math.floor(math.log2(self.n_heads))
        powers = [2 ** (-8 * (i + 1) / closest) for i in range(closest)]
        extra = [2 ** (-4 * (2 * i + 1) / closest) for i in range(self.n_heads - closest)]
        return torch.tensor(powers + extra, dtype=torch.float64)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n)
        distance = (i[None, :] - i[:, None]).abs().to(x)
        dots = q @ k.mT * self.head_dim**-0.5 - self.slopes()[:, None, None] * distance
        if self.causal:
            dots = dots.masked_fill(i[None, :] > i[:, None], -torch.finfo(dots.dtype).max)
        out = dots.softmax(-1) @ v
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class BucketAttention(nn.Module):
    """A table of buckets of distances, in both directions or, in a decoder, only back."""

    def __init__(self, d_model, n_heads, d_kv, is_decoder, buckets, max_distance):
        super().__init__()
        self.d_model, self.n_heads, self.d_kv, self.is_decoder = d_model, n_heads, d_kv, is_decoder
        self.buckets, self.max_distance = buckets, max_distance
        inner = n_heads * d_kv
        self.q, self.k = (
            nn.Linear(d_model, inner, bias=False),
            nn.Linear(d_model, inner, bias=False),
        )
        self.v, self.o = (
            nn.Linear(d_model, inner, bias=False),
            nn.Linear(inner, d_model, bias=False),
        )
        self.relative_attention_bias = nn.Embedding(buckets, n_heads)

    def bucket(self, relative):
        buckets, offset = self.buckets, torch.zeros_like(relative)
        if self.is_decoder:
            distance = (-relative).clamp(min=0)
        else:
            buckets //= 2
            offset, distance = (relative > 0).long() * buckets, relative.abs()
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(distance < exact, distance, far)

    def forward(self, hidden_states):
        b, t, _ = hidden_states.shape
        heads = (f(hidden_states).view(b, t, -1, self.d_kv) for f in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        position = torch.arange(t)
        relative = position[None, :] - position[:, None]
        bias = self.relative_attention_bias(self.bucket(relative)).permute(2, 0, 1)
        if self.is_decoder:
            bias = bias.masked_fill(relative > 0, torch.finfo(bias.dtype).min)
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.o(out.transpose(1, 2).contiguous().view(b, t, -1))


BIASES = [
    Subject(
        "alibi_keys",
        drawn(lambda rng: AlibiKeys(pick(rng, 22, 26), pick(rng, 4, 8), pick(rng, 6, 10))),
        takes_tokens("width"),
        lambda m: attention_truth(m.width, m.heads, m.head_dim, mask="CAUSAL", bias="alibi"),
        "slopes in a buffer, heads a power of two, positions of keys alone",
    ),
    Subject(
        "alibi_distances",
        drawn(
            lambda rng: AlibiDistances(
                pick(rng, 22, 26), pick(rng, 3, 5, 6), pick(rng, 8, 10), pick(rng, True, False)
            )
        ),
        takes_tokens("dim"),
        lambda m: attention_truth(
            m.dim,
            m.n_heads,
            m.head_dim,
            biases="qkvo",
            mask="CAUSAL" if m.causal else "FULL",
            bias="alibi",
        ),
        "heads no power of two, absolute distance, causal in some",
    ),
    Subject(
        "t5_buckets",
        drawn(
            lambda rng: BucketAttention(
                *free_sizes(rng), pick(rng, True, False), pick(rng, 8, 12), pick(rng, 10, 20)
            )
        ),
        takes_tokens("d_model"),
        lambda m: attention_truth(
            m.d_model,
            m.n_heads,
            m.d_kv,
            scale=1.0,
            mask="CAUSAL" if m.is_decoder else "FULL",
            bias="t5",
        ),
        "a table of buckets, in both directions in some, logits not scaled",
    ),
]
