"""Linear attention in its quadratic form, as on a whiteboard."""

from torch import nn
from torch.nn import functional as F


class LinearAttention(nn.Module):
    """Weights `phi(q).phi(k)` over their row sums, phi = elu + 1; mask `*B T`, True is there."""

    def __init__(self, in_features, num_heads, head_dim, *, causal=False):
        super().__init__()
        self.head_dim, self.causal = head_dim, causal
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(in_features, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=False)

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B N T H

    def forward(self, x, mask=None):
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # *B T D
        q = F.elu(self.split(self.q_proj(x))) + 1  # *B N T H
        k = F.elu(self.split(self.k_proj(x))) + 1  # *B N T H
        v = self.split(self.v_proj(x))  # *B N T H
        weights = q @ k.transpose(-2, -1)  # *B N T T
        if self.causal:
            weights = weights.tril()  # *B N T T
        if mask is not None:
            weights = weights * mask.unsqueeze(-2).unsqueeze(-3)  # *B N T T
        total = weights.sum(dim=-1, keepdim=True)  # *B N T 1
        weights = weights / total.masked_fill(total == 0, 1.0)  # *B N T T
        context = (weights @ v).transpose(-3, -2)  # *B T N H
        if mask is not None:
            context = context * mask.unsqueeze(-1).unsqueeze(-1)  # *B T N H
        return self.o_proj(context.flatten(-2))  # *B T D
