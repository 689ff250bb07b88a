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
    """N query heads on K key/value heads; mask broadcasts to `*B N T S`, True sees.

    `scale`, `softcap` and `slopes` (ALiBi's, one a query head) say what happens to the logits. A
    row that may look at nothing gives zeros, or by `empty="mean"` what finfo.min gives.
    """

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
        norm_after_rotary=False,
        mask=None,
        scale=None,
        softcap=None,
        slopes=None,
        sinks=False,
        qkv_bias=False,
        out_bias=False,
        dropout=0.0,
    ):
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.norm_after_rotary, self.mask = norm_after_rotary, mask
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.slopes = softcap, slopes
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.dropout = nn.Dropout(dropout)

    def placed(self, x, norm, positions):
        x = x.unflatten(-1, (-1, self.head_dim))  # *B T N H
        if norm and not self.norm_after_rotary:
            x = norm(x)  # *B T N H
        x = self.rotary(x, positions) if self.rotary else x  # *B T N H
        return norm(x) if norm and self.norm_after_rotary else x  # *B T N H

    def queried(self, x):
        return self.q_proj(x)  # *B T (N H)

    def keyed(self, x, positions):
        return self.placed(self.k_proj(x), self.k_norm, positions)  # *B T K H

    def valued(self, x):
        return self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # *B T K H

    def seen(self, mask, valid, T):
        mask = self.mask if mask is None else mask
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril()  # T T
        return mask if valid is None else mask & valid[..., None, None, :]  # *B N T T

    def scored(self, logits):
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)  # *B N T T
        if self.slopes is not None:
            places = torch.arange(logits.shape[-1])  # T
            distance = (places[:, None] - places).abs()  # T T
            slopes = torch.as_tensor(self.slopes).to(logits.dtype)  # N
            logits = logits - slopes[:, None, None] * distance  # *B N T T
        return logits

    def weighed(self, scores):
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)  # *B N T T
        column = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)  # *B N T 1
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]  # *B N T T

    def read(self, context, x):
        return context  # *B T N H; what a variant does before the output projection

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
        q = self.placed(self.queried(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = self.keyed(x, positions).transpose(-3, -2)  # *B K T H
        v = self.valued(x).transpose(-3, -2)  # *B K T H
        k = k.repeat_interleave(self.groups, dim=-3)  # *B N T H
        v = v.repeat_interleave(self.groups, dim=-3)  # *B N T H
        scores = self.scored(q @ k.transpose(-2, -1) * self.scale)  # *B N T T
        mask = self.seen(mask, valid, x.shape[-2]).expand(scores.shape)  # *B N T T
        hidden = torch.finfo(x.dtype).min if empty == "mean" else -torch.inf
        weights = self.weighed(scores.masked_fill(~mask, hidden))  # *B N T T
        if empty == "zero":
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        context = self.read((self.dropout(weights) @ v).transpose(-3, -2), x)  # *B T N H
        y = self.o_proj(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
