"""Transformer-XL's attention by distances, as on a whiteboard: every distance looked up."""

import torch
from torch import nn


class RelativeShiftAttention(nn.Module):
    """`softmax(((q + u) k + (q + v) r[i - j] + (q + s) e[other]) / sqrt(H)) values`."""

    def __init__(
        self,
        in_features,
        num_heads,
        head_dim,
        *,
        biases="shared",
        layout="half",
        mask=None,
        qkv_bias=False,
        out_bias=False,
        dropout=0.0,
    ):
        super().__init__()
        self.head_dim, self.layout, self.mask = head_dim, layout, mask
        width = num_heads * head_dim
        self.q_proj = nn.Linear(in_features, width, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, width, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, width, bias=qkv_bias)
        self.r_proj = nn.Linear(in_features, width, bias=False)
        self.o_proj = nn.Linear(width, in_features, bias=out_bias)
        self.r_w_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.r_r_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
        if biases == "segment":
            self.r_s_bias = nn.Parameter(torch.zeros(num_heads, head_dim))
            self.seg_embed = nn.Parameter(torch.zeros(2, num_heads, head_dim))
        self.dropout = nn.Dropout(dropout)

    def sinusoids(self, distance, like):
        D = self.q_proj.in_features
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        rates = 10_000.0 ** (-torch.arange(0, D, 2, dtype=wide) / D)  # D/2
        angles = distance.to(wide)[..., None] * rates  # T T D/2
        parts = [angles.sin(), angles.cos()]
        if self.layout == "half":
            return torch.cat(parts, dim=-1).to(like.dtype)  # T T D
        return torch.stack(parts, dim=-1).flatten(-2).to(like.dtype)  # T T D

    def forward(self, x, mask=None, segments=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            mask = seen if mask is None else mask & seen  # *B N T T
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))  # *B T N H
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        places = torch.arange(x.shape[-2])  # T
        near = self.sinusoids(places[:, None] - places, x)  # T T D
        r = self.r_proj(near).unflatten(-1, (-1, self.head_dim))  # T T N H
        scores = torch.einsum("...inh,...jnh->...nij", q + self.r_w_bias, k)  # *B N T T
        scores = scores + torch.einsum("...inh,ijnh->...nij", q + self.r_r_bias, r)
        if segments is not None:
            other = (segments[..., :, None] != segments[..., None, :]).long()  # *B T T
            e = self.seg_embed[other]  # *B T T N H
            scores = scores + torch.einsum("...inh,...ijnh->...nij", q + self.r_s_bias, e)
        scores = scores / self.head_dim**0.5  # *B N T T
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T T
        weights = torch.softmax(scores, dim=-1)  # *B N T T
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        context = self.dropout(weights) @ v.transpose(-3, -2)  # *B N T H
        y = self.o_proj(context.transpose(-3, -2).flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
