"""One head of causal attention whose scores are not scaled, as on a whiteboard."""

import torch
from torch import nn


class SingleHeadAttention(nn.Module):
    """`softmax(q k^T, future at -inf) v`, without biases."""

    def __init__(self, d_in, head_size, *, scale=False, value=True):
        super().__init__()
        self.head_size = head_size
        self.scale = scale
        self.key = nn.Linear(d_in, head_size, bias=False)
        self.query = nn.Linear(d_in, head_size, bias=False)
        self.value = nn.Linear(d_in, head_size, bias=False) if value else None

    def forward(self, x):
        T = x.shape[-2]
        k = self.key(x)  # *B T H
        q = self.query(x)  # *B T H
        wei = q @ k.transpose(-2, -1)  # *B T T
        if self.scale:
            wei = wei * self.head_size**-0.5  # *B T T
        tril = torch.tril(torch.ones(T, T, device=x.device))  # T T
        wei = wei.masked_fill(tril == 0, float("-inf"))  # *B T T
        wei = torch.softmax(wei, dim=-1)  # *B T T
        v = self.value(x) if self.value is not None else x  # *B T h
        return wei @ v  # *B T h
