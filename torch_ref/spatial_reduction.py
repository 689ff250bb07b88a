"""PVT's attention with spatial reduction, as on a whiteboard."""

import torch
from torch import nn


class SpatialReductionAttention(nn.Module):
    """`dense(softmax(q k^T / sqrt(H)) v)`, keys and values of a smaller copy of the image."""

    def __init__(self, dim, num_heads, ratio, *, qkv_bias=True, eps=1e-6, mask=None, dropout=0.0):
        super().__init__()
        self.num_heads, self.mask = num_heads, mask
        self.query = nn.Linear(dim, dim, bias=qkv_bias)
        self.key = nn.Linear(dim, dim, bias=qkv_bias)
        self.value = nn.Linear(dim, dim, bias=qkv_bias)
        self.dense = nn.Linear(dim, dim)
        self.sequence_reduction = self.layer_norm = None
        if ratio > 1:
            self.sequence_reduction = nn.Conv2d(dim, dim, kernel_size=ratio, stride=ratio)
            self.layer_norm = nn.LayerNorm(dim, eps=eps)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def reduced(self, x):
        if self.sequence_reduction is None:
            return x.flatten(-3, -2)  # *B S D
        images = x.movedim(-1, -3)  # *B D Y X
        z = self.sequence_reduction(images.reshape(-1, *images.shape[-3:]))  # B D Y' X'
        z = z.flatten(-2).transpose(-2, -1)  # B S D
        return self.layer_norm(z.reshape(*x.shape[:-3], *z.shape[-2:]))  # *B S D

    def forward(self, x, mask=None):
        mask = self.mask if mask is None else mask
        z = self.reduced(x)  # *B S D
        q = self.split(self.query(x.flatten(-3, -2)))  # *B N T H
        k, v = self.split(self.key(z)), self.split(self.value(z))  # *B N S H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return self.dense(context.flatten(-2)).unflatten(-2, x.shape[-3:-1])  # *B Y X D
