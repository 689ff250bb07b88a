"""Mamba, one token after another, as on a whiteboard."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Mamba(nn.Module):
    """A state of each component that decays and takes in `dt x B'`; C reads it; segments `*B T`."""

    def __init__(
        self,
        in_features,
        *,
        width=None,
        state_dim=16,
        step_rank=None,
        conv_size=4,
        conv_bias=True,
        use_bias=False,
        norms=None,
        eps=1e-6,
    ):
        super().__init__()
        self.width = 2 * in_features if width is None else width
        self.rank = math.ceil(in_features / 16) if step_rank is None else step_rank
        self.state_dim, self.norms, self.eps = state_dim, norms, eps
        self.in_proj = nn.Linear(in_features, 2 * self.width, bias=use_bias)
        self.conv1d = nn.Conv1d(
            self.width, self.width, conv_size, groups=self.width, bias=conv_bias
        )
        self.x_proj = nn.Linear(self.width, self.rank + 2 * state_dim, bias=False)
        if norms == "gains":
            self.dt_layernorm = nn.RMSNorm(self.rank, eps=eps)
            self.b_layernorm = nn.RMSNorm(state_dim, eps=eps)
            self.c_layernorm = nn.RMSNorm(state_dim, eps=eps)
        self.dt_proj = nn.Linear(self.rank, self.width, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(self.width))
        decay = torch.arange(1, state_dim + 1, dtype=torch.float32).expand(self.width, state_dim)
        self.A_log = nn.Parameter(decay.log())
        self.D = nn.Parameter(torch.ones(self.width))
        self.out_proj = nn.Linear(self.width, in_features, bias=use_bias)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, z = self.in_proj(x).chunk(2, dim=-1)  # *B T E, *B T E
        x = self.convolved(x, starts)  # *B T E
        dt, b, c = self.x_proj(x).split([self.rank, self.state_dim, self.state_dim], dim=-1)
        if self.norms == "plain":
            dt, b, c = (self.plain(a) for a in (dt, b, c))
        elif self.norms == "gains":
            dt, b, c = self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)
        dt = F.softplus(self.dt_proj(dt).to(wide) + self.dt_bias)  # *B T E
        decay = -self.A_log.to(wide).exp()  # E N
        h = torch.zeros(*x.shape[:-2], self.width, self.state_dim, dtype=wide)  # *B E N
        outputs = []
        for t in range(x.shape[-2]):
            step = dt[..., t, :, None]  # *B E 1
            h = torch.where(starts[..., t, None, None], 0, h) * (decay * step).exp()
            h = h + step * x[..., t, :, None] * b[..., t, None, :]
            outputs.append(torch.einsum("...en,...n->...e", h, c[..., t, :].to(wide)))
        y = torch.stack(outputs, dim=-2) + self.D * x  # *B T E
        y = y.to(x.dtype).to(wide) * F.silu(z.to(wide))
        return self.out_proj(y.to(x.dtype))  # *B T D

    def plain(self, x):
        """x by the root of its mean square."""
        size = x.float() if x.dtype != torch.float64 else x
        return (size * (size.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)

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
