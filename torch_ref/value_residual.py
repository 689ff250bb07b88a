"""Value residual attention, as on a whiteboard."""

import torch
from torch import nn

from torch_ref.grouped_query import GroupedQueryAttention


class ValueResidualAttention(GroupedQueryAttention):
    """Values half way to the first layer's, or as far as a sigmoid of the token says."""

    def __init__(
        self, in_features, num_heads, num_kv_heads, head_dim, *, learned_mix=False, **grouped
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.mix_proj = nn.Linear(in_features, num_kv_heads) if learned_mix else None
        self.first = None

    def valued(self, x):
        v = super().valued(x)  # *B T K H
        if self.first is None:
            return v
        mix = 0.5 if self.mix_proj is None else torch.sigmoid(self.mix_proj(x)).unsqueeze(-1)
        return (1 - mix) * self.first + mix * v  # *B T K H

    def forward(self, x, values=None, valid=None, **given):
        if values is not None and valid is not None:
            values = values.masked_fill(~valid[..., None, None], 0.0)  # *B T K H
        self.first = values
        y = super().forward(x, valid=valid, **given)  # *B T D
        self.first = None
        return y
