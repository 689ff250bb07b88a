"""Self-attention with three matrices to the right of x, as on a whiteboard."""

import torch
from torch import nn


class SelfAttentionV1(nn.Module):
    """`softmax(q k^T / sqrt(d_out)) v`, the weights of shape (d_in, d_out) from U[0, 1)."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.d_out = d_out
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys = x @ self.W_key  # *B T d_out
        queries = x @ self.W_query  # *B T d_out
        values = x @ self.W_value  # *B T d_out
        scores = queries @ keys.transpose(-2, -1)  # *B T T
        weights = torch.softmax(scores / self.d_out**0.5, dim=-1)  # *B T T
        return weights @ values  # *B T d_out
