"""XCiT's cross-covariance attention, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class CrossCovarianceAttention(nn.Module):
    """`proj(softmax(temperature * q k^T) v)`, q and k of norm one over the tokens, H x T."""

    def __init__(self, dim, num_heads, *, qkv_bias=False, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1))
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, valid=None):
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
        qkv = self.qkv(x)  # *B T 3D
        if valid is not None:
            qkv = qkv.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T 3D
        qkv = qkv.unflatten(-1, (3, self.num_heads, -1))  # *B T 3 N H
        q, k, v = qkv.movedim(-4, -1).unbind(-4)  # *B N H T
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)  # *B N H T
        scores = q @ k.transpose(-2, -1) * self.temperature  # *B N H H
        weights = torch.softmax(scores, dim=-1)  # *B N H H
        context = (self.dropout(weights) @ v).movedim(-1, -3)  # *B T N H
        y = self.proj(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
