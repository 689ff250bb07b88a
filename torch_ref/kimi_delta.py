"""Kimi's delta attention, one token after another, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class KimiDeltaAttention(nn.Module):
    """A memory S of which each channel decays, and that each token corrects; segments `*B T`."""

    def __init__(
        self,
        in_features,
        num_heads,
        key_dim,
        value_dim,
        *,
        conv_size=4,
        eps=1e-5,
        chunk=64,  # of no use here, where tokens go one by one
    ):
        super().__init__()
        self.key_dim, self.value_dim = key_dim, value_dim
        keys, values = num_heads * key_dim, num_heads * value_dim
        self.parts = [keys, keys, values]
        self.q_proj = nn.Linear(in_features, keys, bias=False)
        self.k_proj = nn.Linear(in_features, keys, bias=False)
        self.v_proj = nn.Linear(in_features, values, bias=False)
        width = sum(self.parts)
        self.conv1d = nn.Conv1d(width, width, conv_size, groups=width, bias=False)
        self.f_a_proj = nn.Linear(in_features, value_dim, bias=False)
        self.f_b_proj = nn.Linear(value_dim, keys, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(keys))
        self.b_proj = nn.Linear(in_features, num_heads, bias=False)
        self.g_a_proj = nn.Linear(in_features, value_dim, bias=False)
        self.g_b_proj = nn.Linear(value_dim, values, bias=False)
        self.o_norm = nn.RMSNorm(value_dim, eps=eps)
        self.o_proj = nn.Linear(values, in_features, bias=False)

    def forward(self, x, segments=None):
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)  # *B T E
        q, k, v = self.convolved(qkv, starts).split(self.parts, dim=-1)
        q, k = (self.unit(z.unflatten(-1, (-1, self.key_dim))) for z in (q, k))  # *B T N H
        q, v = q * self.key_dim**-0.5, v.unflatten(-1, (-1, self.value_dim))  # *B T N h
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        f = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (-1, self.key_dim))
        decay = (-self.A_log.to(wide).exp().unsqueeze(-1) * F.softplus(f)).exp()  # *B T N H
        beta = self.b_proj(x).sigmoid()  # *B T N
        S = torch.zeros(*x.shape[:-2], *k.shape[-2:], self.value_dim, dtype=wide)  # *B N H h
        outputs = []
        for t in range(x.shape[-2]):
            S = torch.where(starts[..., t, None, None, None], 0, S) * decay[..., t, :, :, None]
            u = v[..., t, :, :] - torch.einsum("...nh,...nhd->...nd", k[..., t, :, :], S)
            S = S + k[..., t, :, :, None] * (beta[..., t, :, None] * u).unsqueeze(-2)
            outputs.append(torch.einsum("...nh,...nhd->...nd", q[..., t, :, :], S))
        context = torch.stack(outputs, dim=-3).to(x.dtype)  # *B T N h
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, (-1, self.value_dim))  # *B T N h
        return self.o_proj((self.o_norm(context) * gate.sigmoid()).flatten(-2))  # *B T D

    def convolved(self, x, starts):
        """Each component's sum over the last tokens of its document, through silu."""
        weight, document = self.conv1d.weight[:, 0], starts.cumsum(-1)  # E W, *B T
        out = x * weight[:, -1]
        for back in range(1, min(weight.shape[-1], x.shape[-2])):
            same = document[..., back:] == document[..., :-back]  # *B T-back
            before = F.pad(x[..., :-back, :] * same.unsqueeze(-1), (0, 0, back, 0))  # *B T E
            out = out + before * weight[:, -1 - back]
        return F.silu(out)

    def unit(self, x):
        wide = x.double() if x.dtype == torch.float64 else x.float()
        return wide / (wide.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
