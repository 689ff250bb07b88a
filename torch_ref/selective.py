"""Selective attention, as on a whiteboard."""

import torch

from torch_ref.grouped_query import GroupedQueryAttention


class SelectiveAttention(GroupedQueryAttention):
    """Scores less the sum, over the rows before, of the positive ones in the first head."""

    def __init__(self, in_features, num_heads, num_kv_heads, head_dim, **grouped):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)

    def weighed(self, scores):
        first = scores[..., :1, :, :].clamp(min=0)  # *B 1 T S
        first = first.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), 0.0)  # *B 1 T S
        first = torch.cat([torch.zeros_like(first[..., :1]), first[..., 1:]], dim=-1)  # *B 1 T S
        before = torch.cat([torch.zeros_like(first[..., :1, :]), first[..., :-1, :]], dim=-2)
        before = before.cumsum(dim=-2).expand(scores.shape)  # *B N T S
        return super().weighed(scores - before.masked_fill(scores == -torch.inf, 0.0))
