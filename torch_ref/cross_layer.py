"""Attention over the keys and values of an earlier layer, as on a whiteboard."""

import torch
from torch import nn


class CrossLayerAttention(nn.Module):
    """Queries are its own; keys and values, normed and turned, are handed in."""

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        rotary=None,
        q_norm=None,
        k_norm=None,
        norm_after_rotary=False,
        mask=None,
        scale=None,
        softcap=None,
        slopes=None,
        sinks=False,
        qkv_bias=False,
        out_bias=False,
        dropout=0.0,
    ):
        super().__init__()
        assert num_heads % num_kv_heads == 0, f"{num_heads} heads, {num_kv_heads} key/value heads"
        assert k_norm is None, "the earlier layer has normed its keys"
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.norm_after_rotary = rotary, q_norm, norm_after_rotary
        self.scale = head_dim**-0.5 if scale is None else scale
        self.mask, self.softcap, self.slopes = mask, softcap, slopes
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.dropout = nn.Dropout(dropout)

    def queries(self, x, positions):
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # *B T N H
        if self.q_norm and not self.norm_after_rotary:
            q = self.q_norm(q)  # *B T N H
        q = self.rotary(q, positions) if self.rotary else q  # *B T N H
        return self.q_norm(q) if self.q_norm and self.norm_after_rotary else q  # *B T N H

    def scores(self, q, k):
        logits = q @ k.transpose(-2, -1) * self.scale  # *B N T T
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)  # *B N T T
        if self.slopes is not None:
            places = torch.arange(logits.shape[-1])  # T
            slopes = torch.as_tensor(self.slopes).to(logits.dtype)  # N
            logits = logits - slopes[:, None, None] * (places[:, None] - places).abs()  # *B N T T
        return logits

    def seen(self, mask, valid, T):
        mask = self.mask if mask is None else mask
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril()  # T T
        return mask if valid is None else mask & valid[..., None, None, :]  # *B N T T

    def weights(self, scores):
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)  # *B N T T
        column = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)  # *B N T 1
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]  # *B N T T

    def forward(self, x, keys_and_values, mask=None, positions=None, valid=None, empty="zero"):
        k, v = keys_and_values  # *B T K H
        if valid is not None:
            x = x.masked_fill(~valid[..., None], 0.0)  # *B T D
            k, v = (part.masked_fill(~valid[..., None, None], 0.0) for part in (k, v))  # *B T K H
        q = self.queries(x, positions).transpose(-3, -2)  # *B N T H
        k = k.transpose(-3, -2).repeat_interleave(self.groups, dim=-3)  # *B N T H
        v = v.transpose(-3, -2).repeat_interleave(self.groups, dim=-3)  # *B N T H
        scores = self.scores(q, k)  # *B N T T
        mask = self.seen(mask, valid, x.shape[-2]).expand(scores.shape)  # *B N T T
        hidden = torch.finfo(x.dtype).min if empty == "mean" else -torch.inf
        weights = self.weights(scores.masked_fill(~mask, hidden))  # *B N T T
        if empty == "zero":
            weights = weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
        o = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        y = self.o_proj(o.flatten(-2))  # *B T D
        return y if valid is None else y.masked_fill(~valid[..., None], 0.0)  # *B T D
