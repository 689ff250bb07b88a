"""Grouped-query attention with a gate, as on a whiteboard."""

import torch
from torch import nn

from torch_ref.grouped_query import GroupedQueryAttention


class GatedQueryAttention(GroupedQueryAttention):
    """Heads times a gate: of a number each or a component, of `g_proj` or of a wider `q_proj`."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        gate="full",
        fused=False,
        activation="sigmoid",
        **grouped,
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.activation = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}[activation]
        width = num_heads * (head_dim if gate == "full" else 1)
        self.g_proj = None if fused else nn.Linear(in_features, width, bias=False)
        if fused:
            bias = grouped.get("qkv_bias", False)
            self.q_proj = nn.Linear(in_features, 2 * num_heads * head_dim, bias=bias)

    def queried(self, x):
        q = self.q_proj(x)  # *B T (N H), or *B T (N 2 H)
        if self.g_proj is None:
            q = q.unflatten(-1, (-1, 2, self.head_dim))[..., 0, :].flatten(-2)  # *B T (N H)
        return q

    def read(self, context, x):
        if self.g_proj is None:
            gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim))[..., 1, :]  # *B T N H
        else:
            gate = self.g_proj(x).unflatten(-1, (context.shape[-2], -1))  # *B T N H, or *B T N 1
        return self.activation(gate) * context  # *B T N H
