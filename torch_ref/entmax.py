"""Entmax attention, as on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import emptied, masked, placed, present, scored, seen


class EntmaxAttention(nn.Module):
    """Weights `max(0, (alpha - 1) score - tau) ** (1 / (alpha - 1))` that sum to one.

    The support, what lies above tau, is found by halving an interval; from it tau follows as the
    root of a linear (alpha = 2) or quadratic (alpha = 1.5) equation, through which gradients flow.
    """

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        alpha=1.5,
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
        self.alpha = alpha

    def support(self, z):
        low = z.amax(dim=-1, keepdim=True) - 1  # *B N T 1
        high = low + 1  # *B N T 1
        for _ in range(100):
            tau = (low + high) / 2  # *B N T 1
            total = (z - tau).clamp(min=0).pow(1 / (self.alpha - 1)).sum(-1, keepdim=True)
            low, high = torch.where(total > 1, tau, low), torch.where(total > 1, high, tau)
        return z > (low + high) / 2  # *B N T S

    def entmax(self, scores):
        none = (scores == -torch.inf).all(dim=-1, keepdim=True)  # *B N T 1
        z = scores.masked_fill(none, 0.0) * (self.alpha - 1)  # *B N T S
        inside = self.support(z.detach())  # *B N T S
        n = inside.sum(dim=-1, keepdim=True)  # *B N T 1
        z = z.masked_fill(~inside, 0.0)  # *B N T S
        mean = z.sum(dim=-1, keepdim=True) / n  # *B N T 1
        if self.alpha == 2:
            return (z - mean + 1 / n).masked_fill(~inside | none, 0.0)  # *B N T S
        spread = (z - mean).masked_fill(~inside, 0.0).square().sum(dim=-1, keepdim=True)
        tau = mean - ((1 - spread) / n).sqrt()  # *B N T 1
        return (z - tau).square().masked_fill(~inside | none, 0.0)  # *B N T S

    def forward(self, x, mask=None, positions=None, valid=None):
        x = present(x, valid)  # *B T D
        q = placed(self, self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = placed(self, self.k_proj(x), self.k_norm, positions).transpose(-3, -2)  # *B K T H
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B K T H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = self.entmax(masked(scores, mask))  # *B N T T
        weights = emptied(weights, mask)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
