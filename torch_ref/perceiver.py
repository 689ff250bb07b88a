"""Perceiver's attention with its norms, as on a whiteboard."""

import torch
from torch import nn


class PerceiverAttention(nn.Module):
    """`x + dense(attention of query(norm1(x)) over key and value of norm2(memory))`."""

    def __init__(
        self,
        in_features,
        num_heads,
        *,
        memory_features=None,
        qk_features=None,
        v_features=None,
        residual=True,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        source = memory_features or in_features
        qk = qk_features or in_features
        values = v_features or qk
        out = in_features if memory_features else values
        self.num_heads, self.residual, self.mask = num_heads, residual, mask
        self.layernorm1 = nn.LayerNorm(in_features)
        self.layernorm2 = nn.LayerNorm(memory_features) if memory_features else None
        self.query, self.key = nn.Linear(in_features, qk), nn.Linear(source, qk)
        self.value, self.dense = nn.Linear(source, values), nn.Linear(values, out)
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
        latents = self.layernorm1(x)  # *B T D
        source = latents if memory is None else self.layernorm2(memory)  # *B S E
        q, k = self.split(self.query(latents)), self.split(self.key(source))  # *B N T H
        v = self.split(self.value(source))  # *B N S h
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N h
        y = self.dense(context.flatten(-2))  # *B T F
        y = x + y if self.residual else y  # *B T F
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T F
