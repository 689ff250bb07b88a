"""Sigmoid attention, as on a whiteboard."""

import math

import torch

from torch_ref.grouped_query import GroupedQueryAttention


class SigmoidAttention(GroupedQueryAttention):
    """Weights `sigmoid(score + bias)`, the bias -log S unless it is given."""

    def __init__(
        self, in_features, num_heads, num_kv_heads, head_dim, *, logit_bias=None, **grouped
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.logit_bias = logit_bias

    def weighed(self, scores):
        keys = scores.shape[-1]  # S
        bias = -math.log(keys) if self.logit_bias is None else self.logit_bias
        return torch.sigmoid(scores + bias)  # *B N T S
