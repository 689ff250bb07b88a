"""Cross attention, as on a whiteboard."""

import torch
from torch import nn


class CrossAttention(nn.Module):
    """`out_proj(softmax(q k^T / sqrt(H)) v)`, keys and values of a memory, or of x itself.

    N query heads read K key/value heads.
    """

    def __init__(
        self,
        in_features,
        num_heads,
        *,
        num_kv_heads=None,
        head_dim=None,
        memory_features=None,
        norms=None,
        use_bias=True,
        key_bias=True,
        out_bias=None,
        mask=None,
        dropout=0.0,
    ):
        super().__init__()
        width = in_features if memory_features is None else memory_features
        self.head_dim, self.mask = head_dim or in_features // num_heads, mask
        self.groups = 1 if num_kv_heads is None else num_heads // num_kv_heads
        self.q_norm, self.k_norm = (None, None) if norms is None else norms
        inner = num_heads * self.head_dim
        kv_width = inner // self.groups
        self.q_proj = nn.Linear(in_features, inner, bias=use_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=use_bias and key_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=use_bias)
        out_bias = use_bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(inner, in_features, bias=out_bias)
        self.dropout = nn.Dropout(dropout)

    def split(self, x, norm=None):
        x = x.unflatten(-1, (-1, self.head_dim))  # *B T N H
        return (norm(x) if norm else x).transpose(-3, -2)  # *B N T H

    def forward(self, x, memory=None, mask=None, valid=None):
        mask = self.mask if mask is None else mask
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
            seen = valid[..., None, None, :]  # *B 1 1 T
            if memory is None:
                mask = seen if mask is None else mask & seen  # *B N T T
        memory = x if memory is None else memory  # *B S E
        q = self.split(self.q_proj(x), self.q_norm)  # *B N T H
        k = self.split(self.k_proj(memory), self.k_norm)  # *B K S H
        v = self.split(self.v_proj(memory))  # *B K S H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N S H
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # *B N T S
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)  # *B N T S
        weights = torch.softmax(scores, dim=-1)  # *B N T S
        if mask is not None:
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T S
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.out_proj(context.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
