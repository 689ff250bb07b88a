"""Grouped-query attention, as on a whiteboard."""

import torch
from torch import nn


class Rotary:
    """Turns pairs of components by position: `(a, b) -> (a cos - b sin, b cos + a sin)`."""

    def __init__(self, base=10_000.0, layout="half", width=None):
        self.base, self.layout, self.width = base, layout, width

    def __call__(self, x, positions=None):
        width = self.width or x.shape[-1]
        if positions is None:
            positions = torch.arange(x.shape[-3])  # T
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rates = self.base ** (-torch.arange(0, width, 2, dtype=wide) / width)  # P
        angles = positions.to(wide).unsqueeze(-1) * rates  # *B T P
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)  # *B T 1 P
        out = x.clone().to(wide)  # *B T N H
        if self.layout == "half":
            first, second = slice(0, width // 2), slice(width // 2, width)
        else:
            first, second = slice(0, width, 2), slice(1, width, 2)
        a, b = x[..., first].to(wide), x[..., second].to(wide)  # *B T N P
        out[..., first] = a * cos - b * sin  # *B T N P
        out[..., second] = b * cos + a * sin  # *B T N P
        return out.to(x.dtype)  # *B T N H


class GroupedQueryAttention(nn.Module):
    """N query heads on K key/value heads; mask broadcasts to `*B N T S`, True sees."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        rotary=None,
        q_norm=None,
        k_norm=None,
    ):
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=False)

    def placed(self, x, norm, positions):
        x = x.unflatten(-1, (-1, self.head_dim))  # *B T N H
        x = norm(x) if norm else x  # *B T N H
        return self.rotary(x, positions) if self.rotary else x  # *B T N H

    def forward(self, x, mask=None, positions=None):
        T = x.shape[-2]
        q = self.placed(self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = self.placed(self.k_proj(x), self.k_norm, positions).transpose(-3, -2)  # *B K T H
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B K T H
        k = k.repeat_interleave(self.groups, dim=-3)  # *B N T H
        v = v.repeat_interleave(self.groups, dim=-3)  # *B N T H
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5  # *B N T T
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril()  # T T
        mask = mask.expand(scores.shape)  # *B N T T
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)  # *B N T T
        weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        context = (weights @ v).transpose(-3, -2)  # *B T N H
        return self.o_proj(context.flatten(-2))  # *B T D
