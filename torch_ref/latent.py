"""Multi-head latent attention, as on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import emptied, masked, present, scored, seen, softmax


class LatentAttention(nn.Module):
    """N heads on one latent a token; mask broadcasts to `*B N T S`, True sees.

    `absorbed` is a way to compute the same, which the twin does not take: it expands.
    """

    def __init__(
        self,
        in_features,
        num_heads,
        kv_rank,
        nope_dim,
        rotary_dim,
        value_dim,
        *,
        q_rank=None,
        rotary=None,
        mask=None,
        scale=None,
        softcap=None,
        slopes=None,
        absorbed=False,
        qkv_bias=False,
        out_bias=False,
        dropout=0.0,
    ):
        super().__init__()
        self.num_heads, self.nope_dim, self.rotary_dim = num_heads, nope_dim, rotary_dim
        self.kv_rank, self.rotary, self.mask, self.absorbed = kv_rank, rotary, mask, absorbed
        self.scale = (nope_dim + rotary_dim) ** -0.5 if scale is None else scale
        self.softcap, self.slopes = softcap, slopes
        q_width = num_heads * (nope_dim + rotary_dim)
        if q_rank is None:
            self.q_proj = nn.Linear(in_features, q_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(in_features, q_rank, bias=qkv_bias)
            self.q_a_layernorm = nn.RMSNorm(q_rank, eps=1e-6)
            self.q_b_proj = nn.Linear(q_rank, q_width, bias=False)
        self.low_rank_queries = q_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(in_features, kv_rank + rotary_dim, bias=qkv_bias)
        self.kv_a_layernorm = nn.RMSNorm(kv_rank, eps=1e-6)
        self.kv_b_proj = nn.Linear(kv_rank, num_heads * (nope_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, in_features, bias=out_bias)
        self.dropout = nn.Dropout(dropout)

    def turned(self, x, positions):
        return self.rotary(x, positions) if self.rotary else x  # *B T N P

    def q_latent(self, x):
        return self.q_a_layernorm(self.q_a_proj(x)) if self.low_rank_queries else x  # *B T R

    def queries(self, latent, positions):
        q = self.q_b_proj(latent) if self.low_rank_queries else self.q_proj(latent)
        q = q.unflatten(-1, (self.num_heads, -1))  # *B T N H
        plain, rest = q[..., : self.nope_dim], q[..., self.nope_dim :]
        return torch.cat([plain, self.turned(rest, positions)], dim=-1).transpose(-3, -2)

    def keys_and_values(self, x, positions):
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.kv_rank, self.rotary_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)  # *B T L
        shared = self.turned(shared.unsqueeze(-2), positions).transpose(-3, -2)  # *B 1 T P
        both = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))  # *B T N (H - P + h)
        both = both.transpose(-3, -2)  # *B N T (H - P + h)
        k, v = both[..., : self.nope_dim], both[..., self.nope_dim :]
        shared = shared.expand(*k.shape[:-1], self.rotary_dim)  # *B N T P
        return torch.cat([k, shared], dim=-1), v  # *B N T H, *B N T h

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q = self.queries(self.q_latent(x), positions)  # *B N T H
        k, v = self.keys_and_values(x, positions)  # *B N T H, *B N T h
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty))  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N h
        return present(self.o_proj(context.flatten(-2)), valid)  # *B T D
