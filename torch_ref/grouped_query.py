"""Grouped-query attention, as on a whiteboard."""

import torch
from torch import nn

from torch_ref._steps import clamped, emptied, masked, placed, present, scored, seen, softmax


class Rotary:
    """Turns pairs of components by position: `(a, b) -> (a cos - b sin, b cos + a sin)`."""

    def __init__(self, base=10_000.0, layout="half", width=None):
        self.base, self.layout, self.width = base, layout, width

    def __call__(self, x, positions=None):
        width = self.width or x.shape[-1]
        if positions is None:
            positions = torch.arange(x.shape[-3])  # T
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rates = self.base ** (-torch.arange(0, width, 2, dtype=wide) / width)  # P
        angles = positions.to(wide).unsqueeze(-1) * rates  # *B T P
        cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)  # *B T 1 P
        out = x.clone().to(wide)  # *B T N H
        if self.layout == "half":
            first, second = slice(0, width // 2), slice(width // 2, width)
        else:
            first, second = slice(0, width, 2), slice(1, width, 2)
        a, b = x[..., first].to(wide), x[..., second].to(wide)  # *B T N P
        out[..., first] = a * cos - b * sin  # *B T N P
        out[..., second] = b * cos + a * sin  # *B T N P
        return out.to(x.dtype)  # *B T N H


class GroupedQueryAttention(nn.Module):
    """N query heads on K key/value heads; mask broadcasts to `*B N T S`, True sees.

    `scale`, `softcap` and `slopes` (ALiBi's, one a query head) say what happens to the logits. A
    row that may look at nothing gives zeros, or by `empty="mean"` what finfo.min gives.
    """

    def __init__(
        self,
        in_features,
        num_heads,
        num_kv_heads,
        head_dim,
        *,
        clip_qkv=None,
        o_norm=None,
        key_bias=True,
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
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.rotary, self.q_norm, self.k_norm = rotary, q_norm, k_norm
        self.norm_after_rotary, self.mask = norm_after_rotary, mask
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap, self.slopes = softcap, slopes
        self.clip_qkv, self.o_norm = clip_qkv, o_norm
        biased = qkv_bias if isinstance(qkv_bias, str) else "qkv" * qkv_bias
        self.q_proj = nn.Linear(in_features, num_heads * head_dim, bias="q" in biased)
        k_bias = "k" in biased and key_bias
        self.k_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias=k_bias)
        self.v_proj = nn.Linear(in_features, num_kv_heads * head_dim, bias="v" in biased)
        self.o_proj = nn.Linear(num_heads * head_dim, in_features, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None, positions=None, valid=None, empty="zero"):
        x = present(x, valid)  # *B T D
        q = placed(self, self.q_proj(x), self.q_norm, positions).transpose(-3, -2)  # *B N T H
        k = placed(self, self.k_proj(x), self.k_norm, positions).transpose(-3, -2)  # *B K T H
        v = clamped(self.v_proj(x), self.clip_qkv)  # *B T (K H)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)  # *B K T H
        k, v = (y.repeat_interleave(self.groups, dim=-3) for y in (k, v))  # *B N T H
        scores = scored(q @ k.transpose(-2, -1) * self.scale, self.softcap, self.slopes)
        mask = seen(self.mask if mask is None else mask, valid, scores)  # *B N T T
        weights = softmax(masked(scores, mask, empty), self.sinks)  # *B N T T
        weights = emptied(weights, mask, empty)  # *B N T T
        context = (self.dropout(weights) @ v).transpose(-3, -2)  # *B T N H
        context = context.flatten(-2)  # *B T (N H)
        context = self.o_norm(context) if self.o_norm else context  # *B T (N H)
        return present(self.o_proj(context), valid)  # *B T D
