"""Attention within the windows of an image, as on a whiteboard: one window after the other."""

import math

import torch
from torch import nn


class WindowAttention(nn.Module):
    """Swin's attention (version 1) and Swin v2's; valid `*B Y X`, True is there."""

    def __init__(
        self,
        dim,
        window,
        num_heads,
        *,
        shift=(0, 0),
        version=1,
        pretrained=None,
        qkv_bias=True,
        dropout=0.0,
    ):
        super().__init__()
        self.window, self.num_heads, self.shift = window, num_heads, shift
        self.version, self.pretrained = version, pretrained
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, dim, bias=qkv_bias and version == 1)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.o_proj = nn.Linear(dim, dim)
        if version == 1:
            rows = (2 * window[0] - 1) * (2 * window[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads))
        else:
            self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))
            self.mlp_in = nn.Linear(2, 512)
            self.mlp_out = nn.Linear(512, num_heads, bias=False)
        self.dropout = nn.Dropout(dropout)

    def bias_of(self, dy, dx):
        height, width = self.window
        if self.version == 1:
            row = (dy + height - 1) * (2 * width - 1) + dx + width - 1
            return self.relative_position_bias_table[row]  # N
        sides = self.pretrained or self.window
        near = [8 * d / (side - 1) for d, side in zip((dy, dx), sides, strict=True)]
        near = [math.copysign(math.log2(1 + abs(d)) / 3, d) for d in near]
        hidden = torch.relu(self.mlp_in(self.mlp_in.weight.new_tensor(near)))  # 512
        return 16 * torch.sigmoid(self.mlp_out(hidden))  # N

    def bias(self):
        places = [(y, x) for y in range(self.window[0]) for x in range(self.window[1])]
        rows = [[self.bias_of(y - v, x - u) for v, u in places] for y, x in places]
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)  # N T T

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B M N T H

    def attend(self, x, seen):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        if self.version == 1:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B M N T T
        else:
            q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
            scale = self.logit_scale.clamp(max=math.log(100)).exp()  # N 1 1
            scores = q @ k.transpose(-2, -1) * scale  # *B M N T T
        scores = (scores + self.bias()).masked_fill(~seen, -torch.inf)  # *B M N T T
        weights = torch.softmax(scores, dim=-1)  # *B M N T T
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)  # *B M N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B M T N H
        return self.o_proj(context.flatten(-2))  # *B M T C

    def forward(self, x, valid=None):
        height, width = x.shape[-3:-1]
        valid = x.new_ones(x.shape[:-1]).bool() if valid is None else valid
        x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B Y X C
        rows, columns = self.window
        more = -height % rows, -width % columns
        padded = nn.functional.pad(x, (0, 0, 0, more[1], 0, more[0]))  # *B Y X C
        there = nn.functional.pad(valid, (0, more[1], 0, more[0]), value=True)  # *B Y X
        back = [-step for step in self.shift]
        padded, there = torch.roll(padded, back, (-3, -2)), torch.roll(there, back, (-2, -1))
        side = torch.zeros(padded.shape[-3:-1], dtype=torch.long)  # Y X
        side[padded.shape[-3] - self.shift[0] :] += 1  # what was above
        side[:, padded.shape[-2] - self.shift[1] :] += 2  # what was on the left
        cuts = [
            (slice(y, y + rows), slice(z, z + columns))
            for y in range(0, padded.shape[-3], rows)
            for z in range(0, padded.shape[-2], columns)
        ]
        one = torch.stack([padded[(..., *cut, slice(None))] for cut in cuts], dim=-4)
        region = torch.stack([side[cut].flatten() for cut in cuts])[:, None]  # M 1 T
        there = torch.stack([there[(..., *cut)].flatten(-2) for cut in cuts], dim=-2)  # *B M T
        seen = (region[..., None] == region[..., None, :]) & there[..., None, None, :]
        made = self.attend(one.flatten(-3, -2), seen)  # *B M T C
        out = torch.zeros_like(padded)  # *B Y X C
        for i, cut in enumerate(cuts):
            out[(..., *cut, slice(None))] = made[..., i, :, :].unflatten(-2, (rows, columns))
        out = torch.roll(out, self.shift, (-3, -2))[..., :height, :width, :]  # *B Y X C
        return out.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B Y X C
