"""Axial attention, as on a whiteboard."""

import torch
from torch import nn


class AxialAttention(nn.Module):
    """Multi-head attention along each axis, summed or one after the other; valid `*B A1 ... An`."""

    def __init__(self, dim, num_heads, axes, *, summed=True, head_dim=None, dropout=0.0):
        super().__init__()
        self.num_heads, self.axes, self.summed = num_heads, axes, summed
        width = num_heads * (head_dim or dim // num_heads)
        self.to_q = nn.ModuleList(nn.Linear(dim, width, bias=False) for _ in range(axes))
        self.to_kv = nn.ModuleList(nn.Linear(dim, 2 * width, bias=False) for _ in range(axes))
        self.to_out = nn.ModuleList(nn.Linear(width, dim) for _ in range(axes))
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # ... N T H

    def along(self, i, x, valid):
        axis = i - self.axes - 1
        lines = x.movedim(axis, -2)  # ... T C
        k, v = self.to_kv[i](lines).chunk(2, dim=-1)  # ... T (N H)
        q, k, v = self.split(self.to_q[i](lines)), self.split(k), self.split(v)  # ... N T H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # ... N T T
        seen = valid.movedim(axis + 1, -1)[..., None, None, :]  # ... 1 1 T
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)  # ... N T T
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)  # ... N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2).flatten(-2)  # ... T (N H)
        return self.to_out[i](context).movedim(-2, axis)  # *B A1 ... An C

    def forward(self, x, valid=None):
        valid = x.new_ones(x.shape[:-1]).bool() if valid is None else valid
        total, hidden = 0.0, ~valid.unsqueeze(-1)
        for i in range(self.axes):
            made = self.along(i, x.masked_fill(hidden, 0.0), valid)
            total = total + made
            x = x if self.summed else made
        return (total if self.summed else x).masked_fill(hidden, 0.0)
