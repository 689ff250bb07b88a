"""Causal attention, as on a whiteboard."""

import torch
from torch import nn


class CausalAttention(nn.Module):
    """`dropout(softmax(q k^T / sqrt(d_out), future at -inf)) v`, then a dropout on the context."""

    def __init__(
        self, d_in, d_out, context_length, dropout, qkv_bias=False, *, context_dropout=0.0
    ):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.context_dropout = nn.Dropout(context_dropout)
        everybody = torch.ones(context_length, context_length, dtype=torch.bool)
        self.register_buffer("mask", torch.triu(everybody, diagonal=1))

    def forward(self, x):
        T = x.shape[-2]
        assert T <= len(self.mask), f"{T} tokens, context_length {len(self.mask)}"
        keys = self.W_key(x)  # *B T d_out
        queries = self.W_query(x)  # *B T d_out
        values = self.W_value(x)  # *B T d_out
        scores = queries @ keys.transpose(-2, -1)  # *B T T
        scores = scores.masked_fill(self.mask[:T, :T], -torch.inf)  # *B T T
        weights = torch.softmax(scores / self.d_out**0.5, dim=-1)  # *B T T
        weights = self.dropout(weights)  # *B T T
        return self.context_dropout(weights @ values)  # *B T d_out
