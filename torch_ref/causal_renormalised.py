"""Causal attention by softmax, mask and renormalisation, as on a whiteboard."""

import torch
from torch import nn


class CausalRenormalisedAttention(nn.Module):
    """`w = softmax(q k^T / sqrt(d_out))`, times the lower triangle, over its row's sum; `w v`."""

    def __init__(self, d_in, d_out, context_length, dropout=0.0, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("tril", torch.tril(torch.ones(context_length, context_length)))

    def forward(self, x):
        T = x.shape[-2]
        assert T <= len(self.tril), f"{T} tokens, context_length {len(self.tril)}"
        keys = self.W_key(x)  # *B T d_out
        queries = self.W_query(x)  # *B T d_out
        values = self.W_value(x)  # *B T d_out
        scores = queries @ keys.transpose(-2, -1)  # *B T T
        weights = torch.softmax(scores / self.d_out**0.5, dim=-1)  # *B T T
        masked = weights * self.tril[:T, :T]  # *B T T
        weights = masked / masked.sum(dim=-1, keepdim=True)  # *B T T
        return self.dropout(weights) @ values  # *B T d_out
