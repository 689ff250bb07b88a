"""DeBERTa's disentangled attention, as on a whiteboard."""

import math

import torch
from torch import nn


class DisentangledAttention(nn.Module):
    """Content to content, content to position and position to content; no output projection."""

    def __init__(
        self,
        in_features,
        num_heads,
        *,
        terms=("c2p", "p2c"),
        buckets,
        max_positions,
        share=False,
        key_bias=True,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        self.num_heads, self.terms, self.mask = num_heads, terms, mask
        self.buckets, self.max_positions, self.share = buckets, max_positions, share
        self.query_proj = nn.Linear(in_features, in_features)
        self.key_proj = nn.Linear(in_features, in_features, bias=key_bias)
        self.value_proj = nn.Linear(in_features, in_features)
        if "c2p" in terms and not share:
            self.pos_key_proj = nn.Linear(in_features, in_features, bias=key_bias)
        if "p2c" in terms and not share:
            self.pos_query_proj = nn.Linear(in_features, in_features)
        self.dropout = nn.Dropout(dropout)

    def row(self, distance):
        if self.buckets is None:
            return min(max(distance + self.max_positions, 0), 2 * self.max_positions - 1)
        single, bucket = self.buckets // 2, distance
        if abs(distance) > single:
            share = math.log(abs(distance) / single) / math.log((self.max_positions - 1) / single)
            bucket = single + math.ceil(share * (single - 1) - 1e-9)
            bucket = bucket if distance > 0 else -bucket
        return min(max(bucket + self.buckets, 0), 2 * self.buckets - 1)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, x, rel_embeddings, mask=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            mask = seen if mask is None else mask & seen  # *B N T T
        q, k = self.split(self.query_proj(x)), self.split(self.key_proj(x))  # *B N T H
        v = self.split(self.value_proj(x))  # *B N T H
        T, H = q.shape[-2:]
        rows = torch.tensor([[self.row(i - j) for j in range(T)] for i in range(T)])  # T T
        scores = q @ k.transpose(-2, -1)  # *B N T T
        if "c2p" in self.terms:
            project = self.key_proj if self.share else self.pos_key_proj
            near = self.split(project(rel_embeddings))[:, rows]  # N T T H
            scores = scores + torch.einsum("...nih,nijh->...nij", q, near)  # *B N T T
        if "p2c" in self.terms:
            project = self.query_proj if self.share else self.pos_query_proj
            near = self.split(project(rel_embeddings))[:, rows]  # N T T H
            scores = scores + torch.einsum("...njh,nijh->...nij", k, near)  # *B N T T
        scores = scores / (H * (1 + len(self.terms))) ** 0.5  # *B N T T
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T T
        weights = torch.softmax(scores, dim=-1)  # *B N T T
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = context.flatten(-2)  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
