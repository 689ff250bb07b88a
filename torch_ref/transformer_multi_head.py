"""Multi-head attention as in "Attention Is All You Need", as on a whiteboard."""

import torch
from torch import nn


class TransformerMultiHeadAttention(nn.Module):
    """`out_proj(softmax(q k^T / sqrt(H)) v)` in N heads; mask `*B N T S`, True sees."""

    def __init__(self, embed_dim, num_heads, dropout=0.0, bias=True, kdim=None, vdim=None):
        super().__init__()
        assert embed_dim % num_heads == 0, f"embed_dim {embed_dim}, num_heads {num_heads}"
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, query, key=None, value=None, mask=None):
        key = query if key is None else key
        value = key if value is None else value
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)  # *B T D
        q, k, v = self.split(q), self.split(k), self.split(v)  # *B N T H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T S
        if mask is not None:
            mask = mask.expand(scores.shape)  # *B N T S
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return self.out_proj(context.flatten(-2))  # *B T D
