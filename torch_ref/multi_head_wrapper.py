"""Several causal attentions side by side, as on a whiteboard."""

import torch
from torch import nn

from .causal_attention import CausalAttention


class MultiHeadAttentionWrapper(nn.Module):
    """`concat(heads[0](x), ..., heads[N - 1](x))`; d_out is the width of one head."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = nn.ModuleList(
            [
                CausalAttention(d_in, d_out, context_length, dropout, qkv_bias)
                for _ in range(num_heads)
            ]
        )

    def forward(self, x):
        contexts = [head(x) for head in self.heads]  # N times *B T d_out
        return torch.cat(contexts, dim=-1)  # *B T (N d_out)
