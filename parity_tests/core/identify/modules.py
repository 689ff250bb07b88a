"""Attention as people write it by hand, with options and sizes drawn by a seed."""

import math

import numpy as np
import torch
from torch import nn


class Plain(nn.Module):
    """Queries, keys and values by `styles`, causal or not, with a rotary, groups and norms."""

    def __init__(self, rng, style=None, causal=None, rotary=None, norm=None):
        super().__init__()
        draw = rng.choice
        self.n_head, self.kv_heads = ((4, 4), (6, 6), (6, 2), (4, 1))[rng.randint(4)]
        self.head_dim, self.width = int(draw([4, 8])), int(draw([20, 26]))
        style = draw(["fused", "apart"]) if style is None else style
        self.causal = bool(rng.randint(2)) if causal is None else causal
        self.rotary = draw(["none", "half", "neighbours"]) if rotary is None else rotary
        norm = draw(["none", "layer", "rms"]) if norm is None else norm
        self.base = float(draw([10_000.0, 500_000.0]))
        inner, keys = self.n_head * self.head_dim, self.kv_heads * self.head_dim
        self.sizes, bias = [inner, keys, keys], bool(rng.randint(2))
        is_fused = style == "fused" and inner == keys
        names = ["c_attn"] if is_fused else ["to_q", "to_k", "to_v"]
        for name, size in zip(names, [3 * inner] if is_fused else self.sizes, strict=True):
            setattr(self, name, nn.Linear(self.width, size, bias))
        self.names, self.c_proj = names, nn.Linear(inner, self.width, bias)
        kinds = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": nn.Identity}
        self.q_norm, self.k_norm = (kinds[norm](self.head_dim) for _ in range(2))

    def turned(self, x):
        """Rotated queries or keys, `B N T H`."""
        if self.rotary == "none":
            return x
        rates = self.base ** (-torch.arange(0, self.head_dim, 2).to(x) / self.head_dim)
        angles = torch.outer(torch.arange(x.shape[2]).to(x), rates)
        if self.rotary == "half":
            one, two = x.chunk(2, -1)
        else:
            one, two = x[..., ::2], x[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        pair = one * cos - two * sin, two * cos + one * sin
        return torch.cat(pair, -1) if self.rotary == "half" else torch.stack(pair, -1).flatten(-2)

    def forward(self, x):
        made = torch.cat([getattr(self, name)(x) for name in self.names], -1)
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in made.split(self.sizes, -1)
        )
        q, k = self.turned(self.q_norm(q)), self.turned(self.k_norm(k))
        k, v = (y.repeat_interleave(self.n_head // self.kv_heads, 1) for y in (k, v))
        logits = self.changed(q @ k.mT / self.head_dim**0.5)
        if self.causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        return self.c_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def changed(self, logits):
        return logits


class Hidden(Plain):
    """The same up to `limit` tokens, or for the first `limit`, and something else beyond."""

    KINDS = ("window", "best keys", "temperature", "log of the length", "scale", "blocks")

    def __init__(self, rng):
        super().__init__(rng)
        self.kind, self.limit = rng.choice(self.KINDS), round(3 * 300 ** rng.random_sample())

    def changed(self, logits):
        T = logits.shape[-1]
        at = torch.arange(T)
        if self.kind == "window":
            far = (at[:, None] - at).abs() >= self.limit
            return logits.masked_fill(far, -torch.inf)
        if self.kind == "best keys":
            least = logits.topk(min(self.limit, T)).values[..., -1:]
            return logits.masked_fill(logits < least, -torch.inf)
        if self.kind == "temperature":
            return logits * (1 + 0.1 * (at >= self.limit))[:, None]
        if self.kind == "log of the length":
            return logits * max(1.0, math.log(T) / math.log(self.limit))
        if self.kind == "scale":
            return logits * (1.5 if T > self.limit else 1.0)
        return logits * (1 + 0.1 * torch.log1p(at // self.limit))[:, None]


def with_tokens(module, rng, length=7):
    """A module of this file with random weights, and tokens."""
    return module, rng.standard_normal((2, length, module.width))


def attention_of_torch(rng):
    """torch's own attention with drawn options, a call of it and its inputs."""
    heads, head_dim, memory = int(rng.choice([2, 3])), int(rng.choice([4, 6])), rng.randint(3)
    more = [{}, {}, {"kdim": 10, "vdim": 10}][memory]
    options = {"bias": bool(rng.randint(2)), "batch_first": bool(rng.randint(2)), **more}
    module = nn.MultiheadAttention(heads * head_dim, heads, float(rng.choice([0, 0.2])), **options)
    x = rng.standard_normal((2, 7, heads * head_dim))
    k = x if memory == 0 else rng.standard_normal((2, 9, module.kdim))
    padding = np.arange(k.shape[1]) >= [[k.shape[1]], [4]]
    kwargs = {"key_padding_mask": padding} if rng.randint(2) else {}
    order = (0, 1, 2) if options["batch_first"] else (1, 0, 2)
    return module, [y.transpose(order) for y in (x, k, k)], kwargs
