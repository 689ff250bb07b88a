"""Sigmoid attention, as on a whiteboard."""

import math

import torch
from torch import nn

from torch_ref._steps import emptied, masked, placed, present, scored, seen


class SigmoidAttention(nn.Module):
    """Weights `sigmoid(score + bias)`, the bias -log S unless it is given."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        logit_bias=None,
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
        assert not sinks, "sinks join the denominator of a softmax"
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.norm_after_rotary, self.mask = norm_after_rotary, mask
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.slopes = softcap, slopes
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.dropout = nn.Dropout(dropout)
        self.logit_bias = logit_bias

    def bias(self, scores, valid):
        if self.logit_bias is not None:
            return self.logit_bias
        if valid is None:
            return -math.log(scores.shape[-1])
        tokens = valid.sum(-1).clamp(min=1)  # *B
        return -torch.log(tokens.to(scores.dtype))[..., None, None, None]  # *B 1 1 1

    def forward(self, x, mask=None, positions=None, valid=None):
        x = present(x, valid)  # *B T D
        q = placed(self, self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = placed(self, self.k_proj(x), self.k_norm, positions).transpose(-3, -2)  # *B K T H
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B K T H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = torch.sigmoid(masked(scores, mask) + self.bias(scores, valid))  # *B N T T
        weights = emptied(weights, mask)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
