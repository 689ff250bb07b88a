"""Multi-head causal attention in einsum, as on a whiteboard."""

import torch
from torch import nn


class MultiHeadAttentionEinsum(nn.Module):
    """`MultiHeadAttention` whose weights, of shape (d_out, d_in), are used as they lie."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        assert d_out % num_heads == 0, f"d_out {d_out}, num_heads {num_heads}"
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads

        def start(*shape):
            return nn.Parameter((2 * torch.rand(*shape) - 1) / d_in**0.5)

        self.W_query = start(d_out, d_in)
        self.W_key = start(d_out, d_in)
        self.W_value = start(d_out, d_in)
        self.b_query = start(d_out) if qkv_bias else None
        self.b_key = start(d_out) if qkv_bias else None
        self.b_value = start(d_out) if qkv_bias else None
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        everybody = torch.ones(context_length, context_length, dtype=torch.bool)
        self.register_buffer("mask", torch.triu(everybody, diagonal=1))

    def forward(self, x):
        *B, T, _ = x.shape
        assert T <= len(self.mask), f"{T} tokens, context_length {len(self.mask)}"
        queries = torch.einsum("...ti,oi->...to", x, self.W_query)  # *B T d_out
        keys = torch.einsum("...ti,oi->...to", x, self.W_key)  # *B T d_out
        values = torch.einsum("...ti,oi->...to", x, self.W_value)  # *B T d_out
        if self.b_query is not None:
            queries = queries + self.b_query  # *B T d_out
            keys = keys + self.b_key  # *B T d_out
            values = values + self.b_value  # *B T d_out

        queries = queries.reshape(*B, T, self.num_heads, self.head_dim)  # *B T N H
        keys = keys.reshape(*B, T, self.num_heads, self.head_dim)  # *B T N H
        values = values.reshape(*B, T, self.num_heads, self.head_dim)  # *B T N H

        scores = torch.einsum("...tnh,...snh->...nts", queries, keys)  # *B N T T
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)  # *B N T T
        weights = torch.softmax(scores / self.head_dim**0.5, dim=-1)  # *B N T T
        weights = self.dropout(weights)  # *B N T T
        context = torch.einsum("...nts,...snh->...tnh", weights, values)  # *B T N H
        return self.out_proj(context.reshape(*B, T, self.d_out))  # *B T d_out
