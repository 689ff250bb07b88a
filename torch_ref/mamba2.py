"""Mamba 2, one token after another, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class Mamba2(nn.Module):
    """A state of each head that decays and takes in `dt B x'`; C reads it; segments `*B T`."""

    def __init__(
        self,
        in_features,
        num_heads,
        key_dim,
        value_dim,
        *,
        groups=1,
        conv_size=4,
        use_bias=False,
        eps=1e-5,
        chunk=64,  # of no use here, where tokens go one by one
    ):
        super().__init__()
        assert num_heads % groups == 0, f"{num_heads} heads, {groups} groups"
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.groups, self.width = groups, num_heads * value_dim
        mixed = self.width + 2 * groups * key_dim
        self.in_proj = nn.Linear(in_features, self.width + mixed + num_heads, bias=use_bias)
        self.conv1d = nn.Conv1d(mixed, mixed, conv_size, groups=mixed)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.norm = nn.RMSNorm(self.width, eps=eps)
        self.out_proj = nn.Linear(self.width, in_features, bias=use_bias)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        inner = self.conv1d.in_channels
        z, mixed, dt = self.in_proj(x).split([self.width, inner, self.num_heads], dim=-1)
        mixed = self.convolved(mixed, starts)  # *B T E
        shared = self.groups * self.key_dim
        v, k, q = mixed.split([self.width, shared, shared], dim=-1)
        v = v.unflatten(-1, (-1, self.value_dim))  # *B T N h
        each = self.num_heads // self.groups
        k, q = (
            a.unflatten(-1, (-1, self.key_dim)).repeat_interleave(each, dim=-2) for a in (k, q)
        )  # *B T N H
        dt = F.softplus(dt.to(wide) + self.dt_bias)  # *B T N
        decay = (-self.A_log.to(wide).exp() * dt).exp()  # *B T N
        S = torch.zeros(*x.shape[:-2], *k.shape[-2:], self.value_dim, dtype=wide)  # *B N H h
        outputs = []
        for t in range(x.shape[-2]):
            S = torch.where(starts[..., t, None, None, None], 0, S) * decay[..., t, :, None, None]
            u = dt[..., t, :, None] * v[..., t, :, :]  # *B N h
            S = S + k[..., t, :, :, None] * u.unsqueeze(-2)
            outputs.append(torch.einsum("...nh,...nhd->...nd", q[..., t, :, :].to(wide), S))
        y = torch.stack(outputs, dim=-3).to(x.dtype) + self.D.unsqueeze(-1) * v  # *B T N h
        y = y.flatten(-2).to(wide) * F.silu(z.to(wide))  # *B T width
        parts = y.unflatten(-1, (self.groups, -1))  # *B T G width/G
        parts = parts * (parts.square().mean(dim=-1, keepdim=True) + self.norm.eps).rsqrt()
        return self.out_proj(self.norm.weight * parts.flatten(-2).to(x.dtype))  # *B T D

    def convolved(self, x, starts):
        """Each component's sum over the last tokens of its document, through silu."""
        weight, document = self.conv1d.weight[:, 0], starts.cumsum(-1)  # E W, *B T
        out = x * weight[:, -1] + self.conv1d.bias
        for back in range(1, min(weight.shape[-1], x.shape[-2])):
            same = document[..., back:] == document[..., :-back]  # *B T-back
            before = F.pad(x[..., :-back, :] * same.unsqueeze(-1), (0, 0, back, 0))  # *B T E
            out = out + before * weight[:, -1 - back]
        return F.silu(out)
