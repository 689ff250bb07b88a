"""Grouped-query attention whose keys are its values too, on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import emptied, masked, placed, present, scored, seen, softmax


class SharedKeyValueAttention(nn.Module):
    """Values are the keys before norm and rotary, or their own."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        v_norm=None,
        own_values=False,
        rotary=None,
        q_norm=None,
        k_norm=None,
        norm_after_rotary=False,
        mask=None,
        scale=None,
        softcap=None,
        slopes=None,
        sinks=False,
        qkv_bias=False,
        out_bias=False,
        dropout=0.0,
    ):
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.norm_after_rotary, self.v_norm, self.mask = norm_after_rotary, v_norm, mask
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.slopes = softcap, slopes
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        width = num_kv_heads * head_dim
        self.k_proj = nn.Linear(in_features, width, bias=qkv_bias)
        if own_values:
            self.v_proj = nn.Linear(in_features, width, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.dropout = nn.Dropout(dropout)

    def keys_and_values(self, x, positions):
        k = placed(self, self.k_proj(x), self.k_norm, positions)  # *B T K H
        v = getattr(self, "v_proj", self.k_proj)(x).unflatten(-1, (-1, self.head_dim))  # *B T K H
        return k, v if self.v_norm is None else self.v_norm(v)  # *B T K H, *B T K H

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q = placed(self, self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k, v = (y.transpose(-3, -2) for y in self.keys_and_values(x, positions))  # *B K T H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty), self.sinks)  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
