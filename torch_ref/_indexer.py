"""The indexer of sparse attention, as on a whiteboard."""

import torch
from torch import nn


class Indexer(nn.Module):
    """True for the top_k keys of each query; of equal scores the earlier."""

    def __init__(self, latent, width, heads, dim, turned, top_k):
        super().__init__()
        self.heads, self.dim, self.turned, self.top_k = heads, dim, turned, top_k
        self.wq_b = nn.Linear(latent, heads * dim, bias=False)
        self.wk = nn.Linear(width, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = nn.Linear(width, heads, bias=False)

    def placed(self, x, turn, positions):
        if turn is None:
            return x
        first, rest = x[..., : self.turned], x[..., self.turned :]
        return torch.cat([turn(first, positions), rest], dim=-1)  # *B T I H

    @torch.no_grad()
    def forward(self, x, latent, seen, turn, positions):
        q = self.placed(self.wq_b(latent).unflatten(-1, (self.heads, -1)), turn, positions)
        k = self.placed(self.k_norm(self.wk(x)).unsqueeze(-2), turn, positions)  # *B T 1 H
        products = q.transpose(-3, -2) @ k.transpose(-3, -2).transpose(-2, -1)  # *B I T T
        products = torch.relu(products * self.dim**-0.5)  # *B I T T
        weights = self.weights_proj(x).transpose(-2, -1).unsqueeze(-1) * self.heads**-0.5
        scores = (weights * products).sum(dim=-3)  # *B T T
        seen = seen.expand(*scores.shape[:-2], 1, *scores.shape[-2:]).squeeze(-3)  # *B T T
        order = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True)
        best = order.indices[..., : self.top_k]  # *B T top_k
        return torch.zeros_like(seen).scatter(-1, best, True) & seen  # *B T T
