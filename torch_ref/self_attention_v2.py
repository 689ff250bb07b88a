"""Self-attention with three Linear layers, as on a whiteboard."""

import torch
from torch import nn


class SelfAttentionV2(nn.Module):
    """`softmax(q k^T / sqrt(d_out)) v`, with `q, k, v = W_query(x), W_key(x), W_value(x)`."""

    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys = self.W_key(x)  # *B T d_out
        queries = self.W_query(x)  # *B T d_out
        values = self.W_value(x)  # *B T d_out
        scores = queries @ keys.transpose(-2, -1)  # *B T T
        weights = torch.softmax(scores / self.d_out**0.5, dim=-1)  # *B T T
        return weights @ values  # *B T d_out
