"""Lightning attention in its quadratic form, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class LightningAttention(nn.Module):
    """Weights `q.k exp(-slope distance)` over the past, with no softmax; segments `*B T`."""

    def __init__(
        self,
        in_features,
        num_heads,
        key_dim,
        value_dim,
        *,
        slope_factor=1.0,
        eps=1e-6,
        chunk=64,  # of no use here, where all pairs of tokens are taken
    ):
        super().__init__()
        self.num_heads, self.slope_factor = num_heads, slope_factor
        self.q_proj = nn.Linear(in_features, num_heads * key_dim, bias=False)
        self.k_proj = nn.Linear(in_features, num_heads * key_dim, bias=False)
        self.v_proj = nn.Linear(in_features, num_heads * value_dim, bias=False)
        self.output_gate = nn.Linear(in_features, num_heads * value_dim, bias=False)
        self.norm = nn.RMSNorm(num_heads * value_dim, eps=eps)
        self.out_proj = nn.Linear(num_heads * value_dim, in_features, bias=False)

    def split(self, x):
        return F.silu(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)  # *B N T H

    def forward(self, x, segments=None):
        q, k, v = (self.split(f(x)) for f in (self.q_proj, self.k_proj, self.v_proj))
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        steps = torch.arange(x.shape[-2], dtype=wide)  # T
        heads = torch.arange(1, self.num_heads + 1, dtype=wide)  # N
        slopes = self.slope_factor * 2 ** (-8 * heads / self.num_heads)  # N
        distance = (steps[:, None] - steps).unsqueeze(0)  # 1 T T
        decay = (-slopes[:, None, None] * distance.clamp(min=0)).exp() * (distance >= 0)  # N T T
        weights = (q.to(wide) @ k.to(wide).transpose(-2, -1)) * decay  # *B N T T
        if segments is not None:
            document = torch.zeros_like(segments)  # *B T
            document[..., 1:] = (segments[..., 1:] != segments[..., :-1]).cumsum(dim=-1)
            same = document.unsqueeze(-1) == document.unsqueeze(-2)  # *B T T
            weights = weights * same.unsqueeze(-3)
        context = (weights @ v.to(wide)).transpose(-3, -2).to(x.dtype)  # *B T N h
        return self.out_proj(self.output_gate(x).sigmoid() * self.norm(context.flatten(-2)))
