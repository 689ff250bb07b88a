"""Exclusive self attention, as on a whiteboard."""

import torch
from torch import nn

from torch_ref.grouped_query import GroupedQueryAttention


class ExclusiveAttention(GroupedQueryAttention):
    """The output without its part along the token's own value, as far as tanh(alpha) says."""

    def __init__(
        self, in_features, num_heads, num_kv_heads, head_dim, *, learned=True, gate=False, **grouped
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.alpha = nn.Parameter(torch.zeros(num_heads)) if learned else None
        wide = num_heads * head_dim
        self.gate_proj = nn.Linear(in_features, wide, bias=False) if gate else None

    def read(self, context, x):
        v = self.valued(x).repeat_interleave(self.groups, dim=-2)  # *B T N H
        u = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-12)  # *B T N H
        share = 1.0 if self.alpha is None else torch.tanh(self.alpha).unsqueeze(-1)  # N 1
        context = context - share * (context * u).sum(dim=-1, keepdim=True) * u  # *B T N H
        if self.gate_proj is None:
            return context
        return context * torch.sigmoid(self.gate_proj(x)).view_as(context)  # *B T N H
