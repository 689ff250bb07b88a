"""Multi-head causal attention out of one projection, as on a whiteboard."""

import torch
from torch import nn


class MultiHeadAttentionCombined(nn.Module):
    """`MultiHeadAttention` whose queries, keys and values are the thirds of `qkv(x)`."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0, f"d_out {d_out}, num_heads {num_heads}"
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.qkv = nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        everybody = torch.ones(context_length, context_length, dtype=torch.bool)
        self.register_buffer("mask", torch.triu(everybody, diagonal=1))

    def forward(self, x):
        *B, T, _ = x.shape
        assert T <= len(self.mask), f"{T} tokens, context_length {len(self.mask)}"
        queries, keys, values = self.qkv(x).split(self.d_out, dim=-1)  # *B T d_out each
        split = (*B, T, self.num_heads, self.head_dim)
        queries = queries.reshape(split).transpose(-3, -2)  # *B N T H
        keys = keys.reshape(split).transpose(-3, -2)  # *B N T H
        values = values.reshape(split).transpose(-3, -2)  # *B N T H

        scores = queries @ keys.transpose(-2, -1)  # *B N T T
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)  # *B N T T
        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)  # *B N T T
        weights = self.dropout(weights)  # *B N T T

        context = (weights @ values).transpose(-3, -2)  # *B T N H
        context = context.reshape(*B, T, self.d_out)  # *B T d_out
        return self.out_proj(context)  # *B T d_out
