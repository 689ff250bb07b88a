"""Cross attention, as on a whiteboard."""

import torch
from torch import nn


class CrossAttention(nn.Module):
    """`out_proj(softmax(q k^T / sqrt(H)) v)`, keys and values of a memory, or of x itself."""

    def __init__(
        self,
        in_features,
        num_heads,
        *,
        memory_features=None,
        key_bias=True,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        width = in_features if memory_features is None else memory_features
        self.num_heads, self.mask = num_heads, mask
        self.q_proj = nn.Linear(in_features, in_features)
        self.k_proj = nn.Linear(width, in_features, bias=key_bias)
        self.v_proj = nn.Linear(width, in_features)
        self.out_proj = nn.Linear(in_features, in_features)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, x, memory=None, mask=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            if memory is None:
                mask = seen if mask is None else mask & seen  # *B N T T
        memory = x if memory is None else memory  # *B S E
        q = self.split(self.q_proj(x))  # *B N T H
        k = self.split(self.k_proj(memory))  # *B N S H
        v = self.split(self.v_proj(memory))  # *B N S H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.out_proj(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
