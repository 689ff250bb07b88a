"""Multi-head causal attention by weight split, as on a whiteboard."""

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """`out_proj(concat_n(dropout(softmax(q_n k_n^T / sqrt(H), future at -inf)) v_n))`."""

    def __init__(
        self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False, *, out_proj=True
    ):
        super().__init__()
        assert d_out % num_heads == 0, f"d_out {d_out}, num_heads {num_heads}"
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out) if out_proj else None
        self.dropout = nn.Dropout(dropout)
        everybody = torch.ones(context_length, context_length, dtype=torch.bool)
        self.register_buffer("mask", torch.triu(everybody, diagonal=1))

    def forward(self, x):
        *B, T, _ = x.shape
        assert T <= len(self.mask), f"{T} tokens, context_length {len(self.mask)}"
        keys = self.W_key(x).view(*B, T, self.num_heads, self.head_dim)  # *B T N H
        queries = self.W_query(x).view(*B, T, self.num_heads, self.head_dim)  # *B T N H
        values = self.W_value(x).view(*B, T, self.num_heads, self.head_dim)  # *B T N H

        keys = keys.transpose(-3, -2)  # *B N T H
        queries = queries.transpose(-3, -2)  # *B N T H
        values = values.transpose(-3, -2)  # *B N T H

        scores = queries @ keys.transpose(-2, -1)  # *B N T T
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)  # *B N T T
        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)  # *B N T T
        weights = self.dropout(weights)  # *B N T T

        context = (weights @ values).transpose(-3, -2)  # *B T N H
        context = context.reshape(*B, T, self.d_out)  # *B T d_out
        return context if self.out_proj is None else self.out_proj(context)  # *B T d_out
