"""The mean of the tokens so far, as on a whiteboard."""

import torch
from torch import nn


class UniformCausalAverage(nn.Module):
    """`softmax(zeros, future at -inf) x`."""

    def forward(self, x):
        T = x.shape[-2]
        tril = torch.tril(torch.ones(T, T, device=x.device))  # T T
        weights = torch.zeros(T, T, dtype=x.dtype, device=x.device)  # T T
        weights = weights.masked_fill(tril == 0, float("-inf"))  # T T
        weights = torch.softmax(weights, dim=-1)  # T T
        return weights @ x  # *B T D
