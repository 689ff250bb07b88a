"""Self-attention without weights, as on a whiteboard."""

import torch
from torch import nn


class SimplifiedSelfAttention(nn.Module):
    """`softmax(x x^T) x`, or each score divided by its row's sum."""

    def __init__(self, *, normalise="softmax"):
        super().__init__()
        assert normalise in ("softmax", "sum"), normalise
        self.normalise = normalise

    def forward(self, x):
        scores = torch.matmul(x, x.transpose(-2, -1))  # *B T T
        if self.normalise == "sum":
            weights = scores / scores.sum(dim=-1, keepdim=True)  # *B T T
        else:
            weights = torch.softmax(scores, dim=-1)  # *B T T
        return torch.matmul(weights, x)  # *B T D
