"""Additive attention, as on a whiteboard."""

import torch
from torch import nn


class BahdanauAttention(nn.Module):
    """`context_t = sum_i softmax_i(v . tanh(W1 h_i + W2 s_t)) h_i`; mask `*B 1 T S`, True sees."""

    def __init__(self, d_encoder, d_decoder, units):
        super().__init__()
        self.W1 = nn.Linear(d_encoder, units, bias=False)
        self.W2 = nn.Linear(d_decoder, units, bias=False)
        self.v = nn.Linear(units, 1, bias=False)

    def forward(self, h, s, mask=None):
        if mask is not None:  # what nobody sees, and who sees nothing, is zero
            mask = mask.squeeze(-3).expand(*s.shape[:-1], h.shape[-2])  # *B T S
            h = h.masked_fill(~mask.any(dim=-2).unsqueeze(-1), 0.0)  # *B S d_encoder
            s = s.masked_fill(~mask.any(dim=-1).unsqueeze(-1), 0.0)  # *B T d_decoder
        energy = torch.tanh(self.W1(h).unsqueeze(-3) + self.W2(s).unsqueeze(-2))  # *B T S units
        scores = self.v(energy).squeeze(-1)  # *B T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B T S
        weights = torch.softmax(scores, dim=-1)  # *B T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B T S
        return weights @ h  # *B T d_encoder
