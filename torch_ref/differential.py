"""Differential attention, as on a whiteboard."""

import math

import torch
from torch import nn

from torch_ref.grouped_query import GroupedQueryAttention


class DifferentialAttention(GroupedQueryAttention):
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
        sizes = (in_features, num_heads, num_kv_heads, head_dim)
        biases = {"qkv_bias": qkv_bias, "out_bias": out_bias}
        super().__init__(*sizes, rotary=rotary, mask=mask, **biases)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.randn(head_dim) * 0.1) for _ in range(4)
        )
        self.norm = nn.RMSNorm(2 * head_dim, eps=eps, elementwise_affine=False)

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
        q = self.placed(self.q_proj(x), None, positions).transpose(-3, -2)  # *B N T H
        k = self.placed(self.k_proj(x), None, positions).transpose(-3, -2)  # *B K T H
        v = self.valued(x).transpose(-3, -2)  # *B K T H
        v = torch.cat(v.chunk(2, dim=-3), dim=-1)  # *B K/2 T 2H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H, *B N/2 T 2H
        scores = q @ k.transpose(-2, -1) * self.scale  # *B N T T
        mask = self.seen(mask, valid, x.shape[-2]).expand(scores.shape)  # *B N T T
        hidden = torch.finfo(x.dtype).min if empty == "mean" else -torch.inf
        weights = torch.softmax(scores.masked_fill(~mask, hidden), dim=-1)  # *B N T T
        if empty == "zero":
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        share = torch.exp((self.lambda_q1 * self.lambda_k1).sum()) + self.lambda_init
        share = share - torch.exp((self.lambda_q2 * self.lambda_k2).sum())
        first, second = weights.chunk(2, dim=-3)  # *B N/2 T T
        context = ((first - share * second) @ v).transpose(-3, -2)  # *B T N/2 2H
        y = self.o_proj(((1 - self.lambda_init) * self.norm(context)).flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D
