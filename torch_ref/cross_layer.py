"""Attention over the keys and values of an earlier layer, as on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import emptied, masked, placed, present, scored, seen, softmax


class CrossLayerAttention(nn.Module):
    """Queries are its own; keys and values, normed and turned, are handed in."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
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
        assert k_norm is None, "the earlier layer has normed its keys"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.norm_after_rotary = rotary, q_norm, norm_after_rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        self.mask, self.softcap, self.slopes = mask, softcap, slopes
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, keys_and_values, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q = placed(self, self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k, v = keys_and_values  # *B T K H
        if valid is not None:
            k, v = (part.masked_fill(~valid[..., None, None], 0.0) for part in (k, v))  # *B T K H
        k, v = (part.transpose(-3, -2) for part in (k, v))  # *B K T H
        k, v = (part.repeat_interleave(self.groups, dim=-3) for part in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty), self.sinks)  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
