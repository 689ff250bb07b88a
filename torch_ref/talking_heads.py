"""Talking heads in the form of CaiT, as on a whiteboard."""

import torch
from torch import nn


class TalkingHeadsAttention(nn.Module):
    """`proj(proj_w(softmax(proj_l(q k^T / sqrt(H)))) v)`; proj_l and proj_w mix the heads."""

    def __init__(
        self,
        dim,
        num_heads,
        *,
        head_dim=None,
        qkv_bias=False,
        mix_bias=True,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        self.num_heads, self.mask = num_heads, mask
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.qkv = nn.Linear(dim, 3 * num_heads * self.head_dim, bias=qkv_bias)
        self.proj_l = nn.Linear(num_heads, num_heads, bias=mix_bias)
        self.proj_w = nn.Linear(num_heads, num_heads, bias=mix_bias)
        self.proj = nn.Linear(num_heads * self.head_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            mask = seen if mask is None else mask & seen  # *B N T T
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)  # *B N T H
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5  # *B N T T
        scores = self.proj_l(scores.movedim(-3, -1)).movedim(-1, -3)  # *B N T T
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T T
        weights = torch.softmax(scores, dim=-1)  # *B N T T
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        weights = self.proj_w(weights.movedim(-3, -1)).movedim(-1, -3)  # *B N T T
        if mask is not None:
            weights = weights.masked_fill(~mask, 0.0)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.proj(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
