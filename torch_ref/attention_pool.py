"""Pooling by attention, as on a whiteboard."""

import torch
from torch import nn


class AttentionPool(nn.Module):
    """Learned queries over the tokens of x; valid `*B S`, True is there."""

    def __init__(self, dim, num_heads, queries, *, bias=True, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, dim, bias=bias)
        self.v_proj = nn.Linear(dim, dim, bias=bias)
        self.out_proj = nn.Linear(dim, dim, bias=bias)
        self.probe = nn.Parameter(torch.randn(queries, dim))
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, x, valid=None):
        valid = x.new_ones(x.shape[:-1]).bool() if valid is None else valid  # *B S
        x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B S D
        probe = self.probe.expand(*x.shape[:-2], -1, -1)  # *B Q D
        q = self.split(self.q_proj(probe))  # *B N Q H
        k, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))  # *B N S H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N Q S
        seen = valid[..., None, None, :]  # *B 1 1 S
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)  # *B N Q S
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)  # *B N Q S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B Q N H
        return self.out_proj(context.flatten(-2))  # *B Q D
