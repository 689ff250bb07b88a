"""T5's attention, as on a whiteboard."""

import math

import torch
from torch import nn


class T5Attention(nn.Module):
    """`o(softmax(q k^T + bias) v)`, unscaled; the bias is learned for ranges of distances."""

    def __init__(
        self,
        in_features,
        num_heads,
        head_dim,
        *,
        buckets=32,
        max_distance=128,
        bidirectional=True,
        has_bias=True,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        self.head_dim, self.mask = head_dim, mask
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.q = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.k = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.v = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.o = nn.Linear(num_heads * head_dim, in_features, bias=False)
        self.relative_attention_bias = nn.Embedding(buckets, num_heads) if has_bias else None
        self.dropout = nn.Dropout(dropout)

    def bucket(self, distance):
        rows = self.buckets // 2 if self.bidirectional else self.buckets
        behind = max(-distance, 0) if not self.bidirectional else abs(distance)
        first = rows if self.bidirectional and distance > 0 else 0
        single = rows // 2
        if behind < single:
            return first + behind
        share = math.log(behind / single) / math.log(self.max_distance / single)
        return first + min(single + int(share * (rows - single) + 1e-9), rows - 1)

    def position_bias(self, queries, keys):
        rows = [[self.bucket(k - q) for k in range(keys)] for q in range(queries)]  # T S
        return self.relative_attention_bias(torch.tensor(rows)).permute(2, 0, 1)  # N T S

    def forward(self, x, memory=None, mask=None, valid=None, bias=None):
        if bias is None and self.relative_attention_bias is None and memory is None:
            raise ValueError(
                "A layer with has_bias=False has no positions of its own; pass "
                "bias=first.position_bias(T, T) of the first layer of its stack, or 0 for none."
            )
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            if memory is None:
                mask = seen if mask is None else mask & seen  # *B N T T
        memory = x if memory is None else memory
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B N T H
            for y in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(-2, -1)  # *B N T S
        if bias is None and self.relative_attention_bias is not None:
            bias = self.position_bias(*scores.shape[-2:])  # N T S
        if bias is not None:
            scores = scores + bias  # *B N T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.o(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
