"""Grouped-query attention with a gate, as on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import emptied, masked, placed, present, scored, seen, softmax


class GatedQueryAttention(nn.Module):
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
        gate_bias=False,
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
        self.rotary, self.q_norm, self.k_norm, self.mask = rotary, q_norm, k_norm, mask
        self.norm_after_rotary = norm_after_rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.slopes, self.dropout = softcap, slopes, nn.Dropout(dropout)
        self.q_proj = nn.Linear(in_features, (1 + fused) * num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.activation = {"sigmoid": torch.sigmoid, "softplus": nn.functional.softplus}[activation]
        gates = num_heads * (head_dim if gate == "full" else 1)
        self.g_proj = None if fused else nn.Linear(in_features, gates, bias=gate_bias)

    def queries(self, x):
        q = self.q_proj(x)  # *B T (N H), or *B T (N 2 H)
        if self.g_proj is None:
            q = q.unflatten(-1, (-1, 2, self.head_dim))[..., 0, :].flatten(-2)  # *B T (N H)
        return q

    def gates(self, x, num_heads):
        if self.g_proj is None:
            return self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim))[..., 1, :]  # *B T N H
        return self.g_proj(x).unflatten(-1, (num_heads, -1))  # *B T N H, or *B T N 1

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q = placed(self, self.queries(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = placed(self, self.k_proj(x), self.k_norm, positions).transpose(-3, -2)  # *B K T H
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B K T H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty), self.sinks)  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        context = self.activation(self.gates(x, q.shape[-3])) * context  # *B T N H
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
