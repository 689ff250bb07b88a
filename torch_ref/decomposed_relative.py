"""SAM's attention over an image, as on a whiteboard."""

import torch
from torch import nn


class DecomposedRelativeAttention(nn.Module):
    """`proj(softmax(q k / sqrt(H) + q rows[dy] + q columns[dx]) v)`; valid `*B Y X`."""

    def __init__(self, dim, num_heads, size, *, qkv_bias=True, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * size[0] - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * size[1] - 1, dim // num_heads))
        self.dropout = nn.Dropout(dropout)

    def near(self, table, side):
        table = nn.functional.interpolate(table.T[None], size=2 * side - 1, mode="linear")[0].T
        places = torch.arange(side)
        return table[places[:, None] - places + side - 1]  # side side H

    def forward(self, x, valid=None):
        height, width = x.shape[-3:-1]
        valid = x.new_ones(x.shape[:-1]).bool() if valid is None else valid
        x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B Y X C
        made = self.qkv(x).flatten(-3, -2).unflatten(-1, (3, self.num_heads, -1))  # *B T 3 N H
        q, k, v = (part.transpose(-3, -2) for part in made.unbind(-3))  # *B N T H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T T
        rows = self.near(self.rel_pos_h, height)[:, None, :, None]  # Y 1 Y 1 H
        columns = self.near(self.rel_pos_w, width)[None, :, None]  # 1 X 1 X H
        image = q.unflatten(-2, (height, width))  # *B N Y X H
        bias = torch.einsum("...yxh,yxvuh->...yxvu", image, rows + columns)  # *B N Y X Y X
        scores = scores + bias.flatten(-2).flatten(-3, -2)  # *B N T T
        seen = valid.flatten(-2)[..., None, None, :]  # *B 1 1 T
        scores = scores.masked_fill(~seen, -torch.inf)  # *B N T T
        weights = torch.softmax(scores, dim=-1)  # *B N T T
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.proj(context.flatten(-2)).unflatten(-2, (height, width))  # *B Y X C
        return y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B Y X C
