"""Attention with one Linear for several projections."""

import torch
from torch import nn
from torch.nn import functional as F

from .subject import (
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    grouped_sizes,
    norm_truth,
    pick,
    rotary_truth,
    takes_tokens,
)


class NanoAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, bias, dropout):
        super().__init__()
        self.n_embd, self.n_head, self.dropout = n_embd, n_head, dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.attn_dropout = nn.Dropout(dropout)
        tril = torch.ones(block_size, block_size).tril()
        self.register_buffer("tril", tril.view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
        att = att.masked_fill(self.tril[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


def build_nano(rng):
    heads, head_dim = even_sizes(rng)
    return NanoAttention(heads * head_dim, heads, 32, pick(rng, True, False), pick(rng, 0.0, 0.2))


def nano_truth(m):
    return attention_truth(
        m.n_embd,
        m.n_head,
        m.n_embd // m.n_head,
        biases="" if m.c_attn.bias is None else "qkvo",
        mask="CAUSAL",
        dropout=m.dropout,
    )


class VisionAttention(nn.Module):
    def __init__(self, dim, num_heads, qkv_bias, qk_norm):
        super().__init__()
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q) * self.scale, self.k_norm(k)
        x = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


def build_vision(rng):
    heads, head_dim = even_sizes(rng)
    return VisionAttention(heads * head_dim, heads, pick(rng, True, False), pick(rng, True, False))


def vision_truth(m):
    norm = norm_truth("layer", 1e-6) if isinstance(m.q_norm, nn.LayerNorm) else None
    biases = "o" if m.qkv.bias is None else "qkvo"
    return attention_truth(m.dim, m.num_heads, m.head_dim, biases=biases, q_norm=norm, k_norm=norm)


class NeoXAttention(nn.Module):
    """Heads outermost in the fused weight, `(h 3 d)`, and a part of each head is rotated."""

    def __init__(self, hidden_size, heads, rotary_pct, base):
        super().__init__()
        self.hidden_size, self.heads, self.base = hidden_size, heads, base
        self.head_size = hidden_size // heads
        self.rotary_ndims = int(self.head_size * rotary_pct) // 2 * 2
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        exponent = torch.arange(0, self.rotary_ndims, 2).double() / self.rotary_ndims
        self.register_buffer("inv_freq", base**-exponent, persistent=False)

    def rotate(self, x, cos, sin):
        rotated, rest = x.split([self.rotary_ndims, x.shape[-1] - self.rotary_ndims], dim=-1)
        a, b = rotated.chunk(2, dim=-1)
        return torch.cat((rotated * cos + torch.cat((-b, a), -1) * sin, rest), dim=-1)

    def forward(self, hidden_states):
        B, T, _ = hidden_states.shape
        mixed = self.query_key_value(hidden_states).view(B, T, self.heads, 3 * self.head_size)
        query, key, value = mixed.transpose(1, 2).chunk(3, dim=-1)
        angles = torch.outer(torch.arange(T).to(self.inv_freq), self.inv_freq).repeat(1, 2)
        query = self.rotate(query, angles.cos(), angles.sin())
        key = self.rotate(key, angles.cos(), angles.sin())
        scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_size**0.5
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        out = torch.matmul(torch.softmax(scores, -1), value)
        return self.dense(out.permute(0, 2, 1, 3).reshape(B, T, -1))


def build_neox(rng):
    heads, head_dim = pick(rng, (3, 8), (4, 10), (5, 8))
    return NeoXAttention(heads * head_dim, heads, pick(rng, 0.25, 0.5, 1.0), pick(rng, 1e4, 500.0))


def neox_truth(m):
    return attention_truth(
        m.hidden_size,
        m.heads,
        m.head_size,
        biases="qkvo",
        mask="CAUSAL",
        rotary=rotary_truth(m.base, m.rotary_ndims),
    )


class GroupFusedAttention(nn.Module):
    """Groups outermost: each holds its query heads, then one key, then one value."""

    def __init__(self, hidden, num_heads, num_kv_heads, head_dim, bias):
        super().__init__()
        self.hidden, self.num_heads, self.num_kv_heads = hidden, num_heads, num_kv_heads
        self.head_dim, self.groups = head_dim, num_heads // num_kv_heads
        self.wqkv = nn.Linear(hidden, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.wo = nn.Linear(num_heads * head_dim, hidden, bias=bias)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.wqkv(x).view(b, t, self.num_kv_heads, self.groups + 2, self.head_dim)
        q = qkv[..., : self.groups, :].reshape(b, t, self.num_heads, self.head_dim)
        k = qkv[..., -2, :].repeat_interleave(self.groups, dim=2)
        v = qkv[..., -1, :].repeat_interleave(self.groups, dim=2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


def group_fused_truth(m):
    return attention_truth(
        m.hidden,
        m.num_heads,
        m.head_dim,
        kv_heads=m.num_kv_heads,
        biases="" if m.wqkv.bias is None else "qkvo",
        mask="CAUSAL",
    )


class MultiQueryFused(nn.Module):
    """All query heads, then the one key and the one value, which broadcast."""

    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.d_model, self.n_heads, self.d_head = d_model, n_heads, d_head
        self.qkv_proj = nn.Linear(d_model, (n_heads + 2) * d_head)
        self.out_proj = nn.Linear(n_heads * d_head, d_model, bias=False)

    def forward(self, x):
        length = x.shape[1]
        sections = [self.n_heads * self.d_head, self.d_head, self.d_head]
        q, k, v = torch.split(self.qkv_proj(x), sections, dim=-1)
        q = q.unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)
        logits = q @ k.unsqueeze(1).mT * self.d_head**-0.5
        row, column = torch.arange(length)[:, None], torch.arange(length)[None]
        logits = torch.where(column <= row, logits, -1e9)
        y = logits.softmax(-1) @ v.unsqueeze(1)
        return self.out_proj(y.transpose(1, 2).flatten(2))


def multi_query_truth(m):
    return attention_truth(m.d_model, m.n_heads, m.d_head, kv_heads=1, biases="qkv", mask="CAUSAL")


class InnermostFused(nn.Module):
    """q, k and v of each component lie side by side: `(h d 3)`."""

    def __init__(self, dim, heads):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        qkv = self.to_qkv(x).unflatten(-1, (self.heads, -1, 3))
        q, k, v = qkv.unbind(-1)
        dots = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bjhd->bihd", dots.softmax(dim=-1), v)
        return self.to_out(out.flatten(2))


class ClippedAlibi(nn.Module):
    """Clamped projections, optional norms over all heads, and a bias by distance."""

    def __init__(self, d_model, n_heads, clip_qkv, qk_ln):
        super().__init__()
        self.d_model, self.n_heads, self.clip_qkv, self.qk_ln = d_model, n_heads, clip_qkv, qk_ln
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)
        if qk_ln:
            self.q_ln, self.k_ln = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x):
        b, s, d = x.shape
        qkv = self.Wqkv(x).clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = qkv.chunk(3, dim=2)
        if self.qk_ln:
            query, key = self.q_ln(query), self.k_ln(key)
        query, key, value = (
            y.reshape(b, s, self.n_heads, d // self.n_heads).transpose(1, 2)
            for y in (query, key, value)
        )
        slope = 2.0 ** (-8.0 * torch.arange(1, self.n_heads + 1).to(x) / self.n_heads)
        back = torch.arange(1 - s, 1).to(x)
        weight = query.matmul(key.transpose(2, 3)) * (d // self.n_heads) ** -0.5
        weight = weight + (slope[:, None] * back)[:, None]
        causal = torch.ones(s, s).tril().bool()
        weight = weight.masked_fill(~causal, torch.finfo(weight.dtype).min).softmax(-1)
        return self.out_proj(weight.matmul(value).transpose(1, 2).reshape(b, s, d))


def build_clipped(rng):
    head_dim = pick(rng, 6, 10)
    return ClippedAlibi(4 * head_dim, 4, pick(rng, 1.0, 1.5), pick(rng, True, False))


def clipped_truth(m):
    norm = norm_truth("layer", 1e-5, over_heads=True) if m.qk_ln else None
    return attention_truth(
        m.d_model,
        m.n_heads,
        m.d_model // m.n_heads,
        mask="CAUSAL",
        bias="alibi",
        clip=m.clip_qkv,
        q_norm=norm,
        k_norm=norm,
    )


class PackedParameter(nn.Module):
    """One raw `in_proj_weight`, whose thirds are applied by `F.linear`."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        d = self.embed_dim
        q, k, v = (
            F.linear(x, self.in_proj_weight[i : i + d], self.in_proj_bias[i : i + d])
            .unflatten(-1, (self.num_heads, -1))
            .movedim(-2, -3)
            for i in (0, d, 2 * d)
        )
        bias = torch.full((x.shape[1], x.shape[1]), float("-inf"), dtype=x.dtype).triu(1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out_proj(out.movedim(-3, -2).flatten(-2))


def build_heads(kind):
    def build(rng):
        heads, head_dim = even_sizes(rng)
        return kind(heads * head_dim, heads)

    return build


FUSED = [
    Subject(
        "fused_tril_buffer",
        drawn(build_nano),
        takes_tokens("n_embd"),
        nano_truth,
        "q k v in one Linear by split, mask in a buffer, dropout in some",
    ),
    Subject(
        "fused_vision",
        drawn(build_vision),
        takes_tokens("dim"),
        vision_truth,
        "reshape to (B N 3 H D), permute, query scaled first, LayerNorm of each head in some",
    ),
    Subject(
        "fused_heads_outermost",
        drawn(build_neox),
        takes_tokens("hidden_size"),
        neox_truth,
        "(h 3 d), part of a head rotated in halves, finfo.min where masked",
    ),
    Subject(
        "fused_groups_outermost",
        drawn(lambda rng: GroupFusedAttention(*grouped_sizes(rng), pick(rng, True, False))),
        takes_tokens("hidden"),
        group_fused_truth,
        "(k (g q k v) d), repeat_interleave, fused function with is_causal",
    ),
    Subject(
        "fused_multi_query",
        drawn(lambda rng: MultiQueryFused(26, *even_sizes(rng))),
        takes_tokens("d_model"),
        multi_query_truth,
        "query heads, then one key and one value that broadcast; where with -1e9",
    ),
    Subject(
        "fused_innermost",
        drawn(build_heads(InnermostFused)),
        takes_tokens("dim"),
        lambda m: attention_truth(m.dim, m.heads, m.dim // m.heads),
        "(h d 3), unbind, einsum",
    ),
    Subject(
        "fused_clipped_alibi",
        drawn(build_clipped),
        takes_tokens("d_model"),
        clipped_truth,
        "clamped, chunk, bias linear in the key's position, norms over all heads in some",
    ),
    Subject(
        "fused_raw_parameter",
        drawn(build_heads(PackedParameter)),
        takes_tokens("embed_dim"),
        lambda m: attention_truth(
            m.embed_dim, m.num_heads, m.embed_dim // m.num_heads, biases="qkvo", mask="CAUSAL"
        ),
        "thirds of one Parameter by F.linear, mask of 0 and -inf into the fused function",
    ),
]
