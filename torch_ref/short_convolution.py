"""A short convolution between two gates, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class GatedShortConvolution(nn.Module):
    """`out_proj(C * conv(B * x'))`, causal, component by component; segments `*B T`."""

    def __init__(self, in_features, *, conv_size=3, use_bias=False):
        super().__init__()
        self.in_proj = nn.Linear(in_features, 3 * in_features, bias=use_bias)
        self.conv = nn.Conv1d(
            in_features, in_features, conv_size, groups=in_features, bias=use_bias
        )
        self.out_proj = nn.Linear(in_features, in_features, bias=use_bias)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        b, c, x = self.in_proj(x).chunk(3, dim=-1)  # *B T D each
        x = b * x
        weight, document = self.conv.weight[:, 0], starts.cumsum(-1)  # D W, *B T
        out = x * weight[:, -1]  # *B T D
        for back in range(1, min(weight.shape[-1], x.shape[-2])):
            same = document[..., back:] == document[..., :-back]  # *B T-back
            before = F.pad(x[..., :-back, :] * same.unsqueeze(-1), (0, 0, back, 0))  # *B T D
            out = out + before * weight[:, -1 - back]
        out = out if self.conv.bias is None else out + self.conv.bias
        return self.out_proj(c * out)  # *B T D
