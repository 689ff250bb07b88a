"""Multiplicative attention between decoder and encoder states, as on a whiteboard."""

import torch
from torch import nn


class LuongAttention(nn.Module):
    """`context_t = sum_i softmax_i(score(s_t, h_i)) h_i`; mask `*B 1 T S`, True sees."""

    def __init__(self, d_encoder, d_decoder, *, score="general", units=None):
        super().__init__()
        assert score in ("dot", "general", "concat"), score
        self.score = score
        if score == "general":
            self.W = nn.Linear(d_encoder, d_decoder, bias=False)
        if score == "concat":
            self.W = nn.Linear(d_decoder + d_encoder, units, bias=False)
            self.v = nn.Linear(units, 1, bias=False)

    def logits(self, h, s):
        if self.score == "dot":
            return s @ h.transpose(-2, -1)  # *B T S
        if self.score == "general":
            return s @ self.W(h).transpose(-2, -1)  # *B T S
        rows = s.unsqueeze(-2).expand(*s.shape[:-1], h.shape[-2], -1)  # *B T S d_decoder
        columns = h.unsqueeze(-3).expand(*s.shape[:-1], *h.shape[-2:])  # *B T S d_encoder
        both = torch.cat([rows, columns], dim=-1)  # *B T S d_decoder+d_encoder
        return self.v(torch.tanh(self.W(both))).squeeze(-1)  # *B T S

    def forward(self, h, s, mask=None):
        if mask is not None:  # what nobody sees, and who sees nothing, is zero
            mask = mask.squeeze(-3).expand(*s.shape[:-1], h.shape[-2])  # *B T S
            h = h.masked_fill(~mask.any(dim=-2).unsqueeze(-1), 0.0)  # *B S d_encoder
            s = s.masked_fill(~mask.any(dim=-1).unsqueeze(-1), 0.0)  # *B T d_decoder
        scores = self.logits(h, s)  # *B T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B T S
        weights = torch.softmax(scores, dim=-1)  # *B T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B T S
        return weights @ h  # *B T d_encoder
