"""Differential attention, as on a whiteboard."""

import math

import torch
from torch import nn

from torch_ref._steps import emptied, masked, present, seen, softmax


class DifferentialAttention(nn.Module):
    """The weights of head i less lambda times those of head i + N / 2."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        depth,
        *,
        rotary=None,
        mask=None,
        eps=1e-5,
        qkv_bias=False,
        out_bias=False,
    ):
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.mask, self.scale = rotary, mask, head_dim**-0.5
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.randn(head_dim) * 0.1) for _ in range(4)
        )
        self.norm = nn.RMSNorm(2 * head_dim, eps=eps, elementwise_affine=False)

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # *B T N H, *B T K H, *B T K H
        if self.rotary:
            q, k = self.rotary(q, positions), self.rotary(k, positions)  # *B T N H, *B T K H
        q, k, v = (y.transpose(-3, -2) for y in (q, k, v))  # *B N T H, *B K T H, *B K T H
        v = torch.cat(v.chunk(2, dim=-3), dim=-1)  # *B K/2 T 2H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H, *B N/2 T 2H
        scores = q @ k.transpose(-2, -1) * self.scale  # *B N T T
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty))  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        share = torch.exp((self.lambda_q1 * self.lambda_k1).sum()) + self.lambda_init
        share = share - torch.exp((self.lambda_q2 * self.lambda_k2).sum())
        first, second = weights.chunk(2, dim=-3)  # *B N/2 T T
        context = ((first - share * second) @ v).transpose(-3, -2)  # *B T N/2 2H
        y = self.o_proj(((1 - self.lambda_init) * self.norm(context)).flatten(-2))  # *B T D
        return present(y, valid)  # *B T D
