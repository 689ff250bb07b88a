"""The gated delta rule, one token after another, as on a whiteboard."""

import torch
from torch import nn
from torch.nn import functional as F


class GatedDeltaAttention(nn.Module):
    """A decaying memory S that each token corrects; segments and valid `*B T`."""

    def __init__(
        self,
        in_features,
        num_heads,
        key_dim,
        value_dim,
        *,
        num_key_heads=None,
        conv_size=4,
        negative=False,
        eps=1e-6,
        chunk=64,  # of no use here, where tokens go one by one
    ):
        super().__init__()
        keys = num_key_heads or num_heads
        assert num_heads % keys == 0, f"{num_heads} heads, {keys} key heads"
        self.key_dim, self.value_dim, self.groups = key_dim, value_dim, num_heads // keys
        self.parts = [keys * key_dim, keys * key_dim, num_heads * value_dim]
        self.negative = negative
        self.q_proj = nn.Linear(in_features, keys * key_dim, bias=False)
        self.k_proj = nn.Linear(in_features, keys * key_dim, bias=False)
        self.v_proj = nn.Linear(in_features, num_heads * value_dim, bias=False)
        self.a_proj = nn.Linear(in_features, num_heads, bias=False)
        self.b_proj = nn.Linear(in_features, num_heads, bias=False)
        self.g_proj = nn.Linear(in_features, num_heads * value_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, in_features, bias=False)
        width = sum(self.parts)
        self.conv1d = nn.Conv1d(width, width, conv_size, groups=width, bias=False)
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(num_heads))
        self.o_norm = nn.RMSNorm(value_dim, eps=eps)

    def forward(self, x, segments=None, valid=None):
        if valid is not None:
            rows = valid.expand(x.shape[:-1]).reshape(-1, x.shape[-2])  # B T
            flat = x.reshape(-1, *x.shape[-2:])  # B T D
            out = torch.zeros_like(flat)
            for row, there in enumerate(rows):  # each row alone, without what is not there
                ids = None if segments is None else segments.expand(x.shape[:-1])
                ids = None if ids is None else ids.reshape(-1, x.shape[-2])[row, there]
                out[row, there] = self(flat[row, there], ids)
            return out.view_as(x)
        starts = torch.zeros(x.shape[:-1], dtype=torch.bool)  # *B T
        if segments is not None:
            starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)  # *B T E
        q, k, v = self.convolved(qkv, starts).split(self.parts, dim=-1)
        q, k = (self.unit(z.unflatten(-1, (-1, self.key_dim))) for z in (q, k))  # *B T N H
        q, v = q * self.key_dim**-0.5, v.unflatten(-1, (-1, self.value_dim))  # *B T N h
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        decay = (-self.A_log.to(wide).exp() * F.softplus(self.a_proj(x) + self.dt_bias)).exp()
        beta = self.b_proj(x).sigmoid() * (2 if self.negative else 1)  # *B T N
        S = torch.zeros(*x.shape[:-2], *k.shape[-2:], self.value_dim, dtype=wide)  # *B N H h
        outputs = []
        for t in range(x.shape[-2]):
            S = torch.where(starts[..., t, None, None, None], 0, S) * decay[..., t, :, None, None]
            u = v[..., t, :, :] - torch.einsum("...nh,...nhd->...nd", k[..., t, :, :], S)
            S = S + k[..., t, :, :, None] * (beta[..., t, :, None] * u).unsqueeze(-2)
            outputs.append(torch.einsum("...nh,...nhd->...nd", q[..., t, :, :], S))
        context = torch.stack(outputs, dim=-3).to(x.dtype)  # *B T N h
        gate = self.g_proj(x).unflatten(-1, (-1, self.value_dim))  # *B T N h
        return self.o_proj((self.o_norm(context) * F.silu(gate)).flatten(-2))  # *B T D

    def convolved(self, x, starts):
        """Each component's sum over the last tokens of its document, through silu."""
        weight, document = self.conv1d.weight[:, 0], starts.cumsum(-1)  # E W, *B T
        out = x * weight[:, -1]
        for back in range(1, weight.shape[-1]):
            before, there = torch.zeros_like(x), torch.zeros_like(starts)
            before[..., back:, :] = x[..., : max(x.shape[-2] - back, 0), :]
            there[..., back:] = document[..., back:] == document[..., : max(0, -back + x.shape[-2])]
            out = out + before * there.unsqueeze(-1) * weight[:, -1 - back]
        return F.silu(out)

    def unit(self, x):
        wide = x.double() if x.dtype == torch.float64 else x.float()
        length = (wide.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
        return (wide / length).repeat_interleave(self.groups, dim=-2)  # *B T N H
