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
        conv_bias=True,
        use_bias=False,
        out_bias=None,
        norm="after",
        eps=1e-5,
        step_limits=None,
        multipliers=None,
        chunk=64,  # of no use here, where tokens go one by one
    ):
        super().__init__()
        assert num_heads % groups == 0, f"{num_heads} heads, {groups} groups"
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.groups, self.width = groups, num_heads * value_dim
        mixed = self.width + 2 * groups * key_dim
        self.in_proj = nn.Linear(in_features, self.width + mixed + num_heads, bias=use_bias)
        self.conv1d = nn.Conv1d(mixed, mixed, conv_size, groups=mixed, bias=conv_bias)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.D = nn.Parameter(torch.ones(num_heads))
        self.order, self.step_limits = norm, step_limits
        self.multipliers = [1.0] * 6 if multipliers is None else multipliers
        self.norm = nn.RMSNorm(self.width, eps=eps) if norm else None
        out_bias = use_bias if out_bias is None else out_bias
        self.out_proj = nn.Linear(self.width, in_features, bias=out_bias)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        shared = self.groups * self.key_dim
        parts = self.in_proj(x * self.multipliers[0]).split(
            [self.width, self.width, shared, shared, self.num_heads], dim=-1
        )
        parts = [part * m for part, m in zip(parts, self.multipliers[1:], strict=True)]
        z, dt = parts[0], parts[4]
        mixed = self.convolved(torch.cat(parts[1:4], dim=-1), starts)  # *B T E
        v, k, q = mixed.split([self.width, shared, shared], dim=-1)
        v = v.unflatten(-1, (-1, self.value_dim))  # *B T N h
        each = self.num_heads // self.groups
        k, q = (
            a.unflatten(-1, (-1, self.key_dim)).repeat_interleave(each, dim=-2) for a in (k, q)
        )  # *B T N H
        dt = F.softplus(dt.to(wide) + self.dt_bias)  # *B T N
        if self.step_limits is not None:
            dt = dt.clamp(*self.step_limits)
        decay = (-self.A_log.to(wide).exp() * dt).exp()  # *B T N
        S = torch.zeros(*x.shape[:-2], *k.shape[-2:], self.value_dim, dtype=wide)  # *B N H h
        outputs = []
        for t in range(x.shape[-2]):
            S = torch.where(starts[..., t, None, None, None], 0, S) * decay[..., t, :, None, None]
            u = dt[..., t, :, None] * v[..., t, :, :]  # *B N h
            S = S + k[..., t, :, :, None] * u.unsqueeze(-2)
            outputs.append(torch.einsum("...nh,...nhd->...nd", q[..., t, :, :].to(wide), S))
        y = torch.stack(outputs, dim=-3).to(x.dtype) + self.D.unsqueeze(-1) * v  # *B T N h
        y, gate = y.flatten(-2).to(wide), F.silu(z.to(wide))  # *B T width
        if self.order == "before":
            y = self.normed(y).to(x.dtype) * gate
        elif self.order == "after":
            y = self.normed(y * gate)
        else:
            y = y * gate
        return self.out_proj(y.to(x.dtype))  # *B T D

    def normed(self, y):
        """y, normed in groups of heads."""
        parts = y.unflatten(-1, (self.groups, -1))  # *B T G width/G
        parts = parts * (parts.square().mean(dim=-1, keepdim=True) + self.norm.eps).rsqrt()
        return self.norm.weight * parts.flatten(-2)

    def convolved(self, x, starts):
        """Each component's sum over the last tokens of its document, through silu."""
        weight, document = self.conv1d.weight[:, 0], starts.cumsum(-1)  # E W, *B T
        out = x * weight[:, -1]
        out = out if self.conv1d.bias is None else out + self.conv1d.bias
        for back in range(1, min(weight.shape[-1], x.shape[-2])):
            same = document[..., back:] == document[..., :-back]  # *B T-back
            before = F.pad(x[..., :-back, :] * same.unsqueeze(-1), (0, 0, back, 0))  # *B T E
            out = out + before * weight[:, -1 - back]
        return F.silu(out)
