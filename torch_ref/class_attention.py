"""CaiT's class attention, as on a whiteboard."""

import torch
from torch import nn


class ClassAttention(nn.Module):
    """`proj(softmax(q_0 k^T / sqrt(H)) v)`: the first token asks, all tokens answer."""

    def __init__(self, dim, num_heads, *, qkv_bias=False, mask=None, dropout=0.0):
        super().__init__()
        self.num_heads, self.mask = num_heads, mask
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.k = nn.Linear(dim, dim, bias=qkv_bias)
        self.v = nn.Linear(dim, dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, x, mask=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            mask = seen if mask is None else mask & seen  # *B N 1 T
        q = self.split(self.q(x[..., :1, :]))  # *B N 1 H
        k, v = self.split(self.k(x)), self.split(self.v(x))  # *B N T H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N 1 T
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N 1 T
        weights = torch.softmax(scores, dim=-1)  # *B N 1 T
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N 1 T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B 1 N H
        y = self.proj(context.flatten(-2))  # *B 1 D
        return y if valid is None else y.masked_fill(~valid[..., :1, None], 0.0)  # *B 1 D
