"""Longformer's attention, as on a whiteboard."""

import torch
from torch import nn


class LongformerAttention(nn.Module):
    """A window and the global tokens for most; all, by other weights, for the global ones."""

    def __init__(self, dim, num_heads, window, *, dropout=0.0):
        super().__init__()
        self.num_heads, self.half = num_heads, window // 2
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.query_global = nn.Linear(dim, dim)
        self.key_global = nn.Linear(dim, dim)
        self.value_global = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def attend(self, q, k, v, seen):
        q, k, v = self.split(q), self.split(k), self.split(v)  # *B N T H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T T
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)  # *B N T T
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        return (self.dropout(weights) @ v).transpose(-3, -2).flatten(-2)  # *B T D

    def forward(self, x, global_tokens=None, valid=None):
        valid = x.new_ones(x.shape[:-1]).bool() if valid is None else valid  # *B T
        chosen = torch.zeros_like(valid) if global_tokens is None else global_tokens  # *B T
        x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
        index = valid.cumsum(-1)[..., None, :]  # *B 1 T: padding takes no place in the window
        near = (index[..., :, None] - index[..., None, :]).abs() <= self.half  # *B 1 T T
        rows, keys = chosen[..., None, :, None], valid[..., None, None, :]
        local = (near | chosen[..., None, None, :]) & keys & ~rows  # *B 1 T T
        y = self.attend(self.query(x), self.key(x), self.value(x), local)  # *B T D
        every = self.query_global(x), self.key_global(x), self.value_global(x)  # *B T D
        y = y + self.attend(*every, rows & keys)  # *B T D
        return y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
