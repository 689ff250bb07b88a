"""Entmax attention, as on a whiteboard."""

import torch

from torch_ref.grouped_query import GroupedQueryAttention


class EntmaxAttention(GroupedQueryAttention):
    """Weights `max(0, (alpha - 1) score - tau) ** (1 / (alpha - 1))` that sum to one.

    The support, what lies above tau, is found by halving an interval; from it tau follows as the
    root of a linear (alpha = 2) or quadratic (alpha = 1.5) equation, through which gradients flow.
    """

    def __init__(self, in_features, num_heads, num_kv_heads, head_dim, *, alpha=1.5, **grouped):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.alpha = alpha

    def support(self, z):
        low = z.amax(dim=-1, keepdim=True) - 1  # *B N T 1
        high = low + 1  # *B N T 1
        for _ in range(100):
            tau = (low + high) / 2  # *B N T 1
            total = (z - tau).clamp(min=0).pow(1 / (self.alpha - 1)).sum(-1, keepdim=True)
            low, high = torch.where(total > 1, tau, low), torch.where(total > 1, high, tau)
        return z > (low + high) / 2  # *B N T S

    def weighed(self, scores):
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
