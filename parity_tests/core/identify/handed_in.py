"""Attention whose masks, angles, positions or biases come with the call."""

import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .subject import (
    BATCH,
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    free_sizes,
    grouped_sizes,
    pick,
    rotary_truth,
    tokens,
)


def causal_floats(length, hidden=-1e9):
    return np.triu(np.full((length, length), hidden), 1)


def angles_of(positions, width, base):
    return positions[..., None] * base ** (-np.arange(0, width, 2) / width)


class HandedAngles(nn.Module):
    """cos and sin as a pair, an additive mask, and a softmax in float32."""

    def __init__(self, hidden_size, heads, kv_heads, head_dim, attention_bias):
        super().__init__()
        self.hidden_size, self.heads, self.kv_heads = hidden_size, heads, kv_heads
        self.head_dim, self.scaling = head_dim, head_dim**-0.5
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=attention_bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=attention_bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=attention_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=attention_bias)

    def turn(self, x, cos, sin):
        half = self.head_dim // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

    def repeat(self, x):
        b, n, t, d = x.shape
        groups = self.heads // n
        return x[:, :, None].expand(b, n, groups, t, d).reshape(b, n * groups, t, d)

    def forward(self, hidden_states, position_embeddings, attention_mask=None):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = (x.unsqueeze(1) for x in position_embeddings)
        query, key = self.turn(query, cos, sin), self.turn(key, cos, sin)
        weights = torch.matmul(query, self.repeat(key).transpose(2, 3)) * self.scaling
        if attention_mask is not None:
            weights = weights + attention_mask[:, :, :, : key.shape[-2]]
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(weights, self.repeat(value)).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def angle_inputs(module, rng, length):
    half = angles_of(np.arange(length), module.head_dim, 10000.0)
    angles = np.broadcast_to(np.concatenate([half, half], -1), (BATCH, length, module.head_dim))
    mask = np.broadcast_to(causal_floats(length), (BATCH, 1, length, length))
    options = {"position_embeddings": (np.cos(angles), np.sin(angles)), "attention_mask": mask}
    return (tokens(rng, length, module.hidden_size),), options


class HandedPositions(nn.Module):
    """Angles from `position_ids`, looked up in tables of all positions."""

    def __init__(self, dim, heads, head_dim, base):
        super().__init__()
        self.dim, self.heads, self.head_dim, self.base = dim, heads, head_dim, base
        self.q, self.k = nn.Linear(dim, heads * head_dim), nn.Linear(dim, heads * head_dim)
        self.v, self.o = nn.Linear(dim, heads * head_dim), nn.Linear(heads * head_dim, dim)
        rates = base ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        table = torch.outer(torch.arange(64).double(), rates)
        self.register_buffer("cos_cached", torch.cat((table, table), -1).cos())
        self.register_buffer("sin_cached", torch.cat((table, table), -1).sin())

    def apply_rope(self, x, position_ids):
        a, b = x.tensor_split(2, dim=-1)
        cos, sin = self.cos_cached[position_ids], self.sin_cached[position_ids]
        return x * cos[:, None] + torch.cat([-b, a], dim=-1) * sin[:, None]

    def forward(self, x, position_ids):
        b, t, _ = x.shape
        q, k, v = (
            f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q, k = self.apply_rope(q, position_ids), self.apply_rope(k, position_ids)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


def position_inputs(module, rng, length):
    starts = rng.randint(0, 9, size=(BATCH, 1))
    return (tokens(rng, length, module.dim), starts + np.arange(length)), {}


class AnnotatedAttention(nn.Module):
    """Four copies of one Linear in a list, and a boolean mask or None."""

    def __init__(self, h, d_model, dropout):
        super().__init__()
        self.h, self.d_model, self.d_k = h, d_model, d_model // h
        self.linears = nn.ModuleList(copy.deepcopy(nn.Linear(d_model, d_model)) for _ in range(4))
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        count = query.size(0)
        query, key, value = (
            linear(x).view(count, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = query @ key.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        x = self.dropout(scores.softmax(dim=-1)) @ value
        return self.linears[-1](x.transpose(1, 2).reshape(count, -1, self.d_model))


def build_annotated(rng):
    heads, head_dim = even_sizes(rng)
    return AnnotatedAttention(heads, heads * head_dim, pick(rng, 0.0, 0.1))


def annotated_inputs(module, rng, length):
    x = tokens(rng, length, module.d_model)
    mask = rng.standard_normal((BATCH, length, length)) < 0.7
    return (x, x, x), {"mask": mask | np.eye(length, dtype=bool)}


class EncoderSelfAttention(nn.Module):
    """Only the inner half, whose output projection is in another module."""

    def __init__(self, heads, head_dim, dropout):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, head_dim
        self.all_head_size = heads * head_dim
        self.query = nn.Linear(self.all_head_size, self.all_head_size)
        self.key = nn.Linear(self.all_head_size, self.all_head_size)
        self.value = nn.Linear(self.all_head_size, self.all_head_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        shape = (*x.size()[:-1], self.num_attention_heads, self.attention_head_size)
        return x.view(shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / self.attention_head_size**0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous()
        return (context.view(*context.size()[:-2], self.all_head_size),)


def encoder_inputs(module, rng, length):
    padding = np.zeros((BATCH, 1, 1, length))
    padding[1, ..., -2:] = -10000.0
    return (tokens(rng, length, module.all_head_size), padding), {}


class HandedBias(nn.Module):
    """A bias of positions comes with the call, and the causal mask is the module's own."""

    def __init__(self, d_model, n_heads, d_kv):
        super().__init__()
        self.d_model, self.n_heads, self.d_kv = d_model, n_heads, d_kv
        self.q = nn.Linear(d_model, n_heads * d_kv, bias=False)
        self.k = nn.Linear(d_model, n_heads * d_kv, bias=False)
        self.v = nn.Linear(d_model, n_heads * d_kv, bias=False)
        self.o = nn.Linear(n_heads * d_kv, d_model, bias=False)

    def forward(self, x, position_bias):
        heads = [f(x).unflatten(-1, (self.n_heads, self.d_kv)) for f in (self.q, self.k, self.v)]
        scores = torch.einsum("bqnd,bknd->bnqk", heads[0], heads[1]) + position_bias
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        attn = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.o(torch.einsum("bnqk,bknd->bqnd", attn, heads[2]).flatten(-2))


def bias_inputs(module, rng, length):
    bias = rng.standard_normal((1, module.n_heads, length, length))
    return (tokens(rng, length, module.d_model),), {"position_bias": bias}


class HandedAlibi(nn.Module):
    """baddbmm adds slopes times key positions, `(B N, 1, S)`, which come with the call."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.hidden, self.heads, self.head_dim = hidden, heads, hidden // heads
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x, alibi, attention_mask):
        b, t, _ = x.shape
        fused = self.query_key_value(x).view(b, t, self.heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2).reshape(-1, t, self.head_dim) for i in range(3))
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=self.head_dim**-0.5)
        scores = scores.view(b, self.heads, t, t)
        scores = scores.masked_fill(attention_mask, torch.finfo(x.dtype).min)
        context = torch.bmm(scores.softmax(-1).flatten(0, 1), v).view(b, self.heads, t, -1)
        return self.dense(context.transpose(1, 2).reshape(b, t, -1))


def alibi_inputs(module, rng, length):
    slopes = 2.0 ** (-8 * np.arange(1, module.heads + 1) / module.heads)
    alibi = np.tile(slopes[:, None, None] * np.arange(length), (BATCH, 1, 1))
    mask = np.triu(np.ones((BATCH, 1, length, length), bool), 1)
    return (tokens(rng, length, module.hidden), alibi, mask), {}


class ComplexAngles(nn.Module):
    """The rotation is a complex product with `freqs_cis`, which comes with the call."""

    def __init__(self, dim, n_heads, n_kv_heads, head_dim):
        super().__init__()
        self.dim, self.n_heads, self.n_kv_heads, self.head_dim = dim, n_heads, n_kv_heads, head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def turn(self, x, freqs_cis):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3)

    def forward(self, x, freqs_cis, mask=None):
        bsz, seqlen, _ = x.shape
        xq = self.turn(self.wq(x).view(bsz, seqlen, -1, self.head_dim), freqs_cis)
        xk = self.turn(self.wk(x).view(bsz, seqlen, -1, self.head_dim), freqs_cis)
        xv = self.wv(x).view(bsz, seqlen, -1, self.head_dim)
        groups = self.n_heads // self.n_kv_heads
        keys, values = (torch.repeat_interleave(y, groups, dim=2) for y in (xk, xv))
        scores = xq.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / self.head_dim**0.5
        scores = scores if mask is None else scores + mask
        out = scores.softmax(dim=-1) @ values.transpose(1, 2)
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


def complex_inputs(module, rng, length):
    angles = angles_of(np.arange(length), module.head_dim, 500000.0)
    return (
        tokens(rng, length, module.dim),
        np.exp(1j * angles),
        causal_floats(length, -np.inf),
    ), {}


class PackedDocuments(nn.Module):
    """Ids of documents come with the call; a token attends to earlier ones of its own."""

    def __init__(self, width, heads, head_dim):
        super().__init__()
        self.width, self.heads, self.head_dim = width, heads, head_dim
        self.in_proj = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.out_proj = nn.Linear(heads * head_dim, width, bias=True)

    def forward(self, x, document_ids):
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        same = document_ids[:, :, None] == document_ids[:, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=same.tril().unsqueeze(1))
        return self.out_proj(y.permute(0, 2, 1, 3).flatten(2))


def document_inputs(module, rng, length):
    ids = np.sort(rng.randint(0, 3, size=(BATCH, length)), axis=1)
    return (tokens(rng, length, module.width),), {"document_ids": ids}


HANDED_IN = [
    Subject(
        "handed_cos_sin_softmax_float32",
        drawn(lambda rng: HandedAngles(*grouped_sizes(rng), pick(rng, True, False))),
        angle_inputs,
        lambda m: attention_truth(
            m.hidden_size,
            m.heads,
            m.head_dim,
            kv_heads=m.kv_heads,
            biases="" if m.q_proj.bias is None else "qkvo",
            mask="given",
            rotary=rotary_truth(None, m.head_dim, handed_in=True),
        ),
        "(cos, sin) and an additive mask come in; expand and reshape; softmax in float32",
    ),
    Subject(
        "handed_position_ids",
        drawn(lambda rng: HandedPositions(*free_sizes(rng), pick(rng, 10000.0, 100.0))),
        position_inputs,
        lambda m: attention_truth(
            m.dim,
            m.heads,
            m.head_dim,
            biases="qkvo",
            mask="CAUSAL",
            rotary=rotary_truth(m.base, m.head_dim),
        ),
        "position_ids look up cos and sin in tables",
    ),
    Subject(
        "handed_bool_mask",
        drawn(build_annotated),
        annotated_inputs,
        lambda m: attention_truth(
            m.d_model, m.h, m.d_k, biases="qkvo", mask="given", dropout=m.dropout.p
        ),
        "query, key, value, a list of four Linear, masked_fill with -1e9",
    ),
    Subject(
        "handed_padding_no_output",
        drawn(lambda rng: EncoderSelfAttention(*even_sizes(rng), pick(rng, 0.0, 0.1))),
        encoder_inputs,
        lambda m: attention_truth(
            m.all_head_size,
            m.num_attention_heads,
            m.attention_head_size,
            biases="qkv",
            mask="given",
            dropout=m.dropout.p,
        ),
        "additive padding comes in; no output projection; returns a tuple of one",
    ),
    Subject(
        "handed_position_bias",
        drawn(lambda rng: HandedBias(*free_sizes(rng))),
        bias_inputs,
        lambda m: attention_truth(
            m.d_model, m.n_heads, m.d_kv, scale=1.0, mask="CAUSAL", bias="given"
        ),
        "position_bias comes in, logits are not scaled",
    ),
    Subject(
        "handed_alibi",
        drawn(lambda rng: HandedAlibi(4 * pick(rng, 6, 10), 4)),
        alibi_inputs,
        lambda m: attention_truth(
            m.hidden, m.heads, m.head_dim, biases="qkvo", mask="given", bias="given"
        ),
        "baddbmm with the slopes' bias; (h 3 d); a mask that is True where hidden",
    ),
    Subject(
        "handed_freqs_cis",
        drawn(lambda rng: ComplexAngles(*grouped_sizes(rng))),
        complex_inputs,
        lambda m: attention_truth(
            m.dim,
            m.n_heads,
            m.head_dim,
            kv_heads=m.n_kv_heads,
            mask="given",
            rotary=rotary_truth(None, m.head_dim, "neighbours", handed_in=True),
        ),
        "complex angles and a mask with -inf come in",
    ),
    Subject(
        "handed_document_ids",
        drawn(lambda rng: PackedDocuments(*free_sizes(rng))),
        document_inputs,
        lambda m: attention_truth(m.width, m.heads, m.head_dim, biases="o", mask="given"),
        "ids of documents come in, joined with tril",
    ),
]
