"""The source notebooks' own classes, under the names printed there, carried by at most one rule."""

import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn.parity import Rule, compare, judge, plan, port

torch = pytest.importorskip("torch", reason="the notebooks' classes are torch's")
block_size, n_embd = 9, 11


class SelfAttention_v1(torch.nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = torch.nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class SelfAttention_v2(torch.nn.Module):
    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class SelfAttention_v2_W_keys(torch.nn.Module):
    """As in the notebook that prints `W_keys`."""

    def __init__(self, d_in, d_out, qkv_bias=False):
        super().__init__()
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_keys = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)

    def forward(self, x):
        keys, queries, values = self.W_keys(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(-2, -1)
        return torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1) @ values


class CasualAttention(torch.nn.Module):
    """Spelt as printed."""

    def __init__(self, d_in, d_out, context_size, dropout, qkv_bias=False):
        super().__init__()
        self.d_out = d_out
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_size, context_size)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, num_tokens, d_in = x.shape
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        scores = queries @ keys.transpose(1, 2)
        scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.dropout(weights) @ values


class Head(torch.nn.Module):
    """One head of the small GPT, its sizes taken from around it."""

    def __init__(self, head_size, scaled=False):
        super().__init__()
        self.scaled = scaled
        self.key = torch.nn.Linear(n_embd, head_size, bias=False)
        self.query = torch.nn.Linear(n_embd, head_size, bias=False)
        self.value = torch.nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * (k.shape[-1] ** -0.5 if self.scaled else 1.0)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return torch.nn.functional.softmax(wei, dim=-1) @ self.value(x)


class MultiHeadAttentionWrapper(torch.nn.Module):
    def __init__(self, d_in, d_out, context_size, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = torch.nn.ModuleList(
            CasualAttention(d_in, d_out, context_size, dropout, qkv_bias) for _ in range(num_heads)
        )

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)


class MultiHeadAttention(torch.nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.d_out, self.num_heads, self.head_dim = d_out, num_heads, d_out // num_heads
        self.W_query = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = torch.nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, num_tokens, d_in = x.shape
        keys = self.W_key(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_heads, self.head_dim)
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim)
        scores = queries.transpose(1, 2) @ keys.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        context = (weights @ values.transpose(1, 2)).transpose(1, 2)
        return self.out_proj(context.contiguous().view(b, num_tokens, self.d_out))


class MultiHeadAttentionCombinedQKV(torch.nn.Module):
    def __init__(self, d_in, d_out, num_heads, context_length, dropout=0.0, qkv_bias=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.qkv = torch.nn.Linear(d_in, 3 * d_out, bias=qkv_bias)
        self.proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, num_tokens, _ = x.shape
        qkv = self.qkv(x).view(b, num_tokens, 3, self.num_heads, self.head_dim)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = queries @ keys.transpose(-2, -1)
        scores = scores.masked_fill(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        weights = self.dropout(torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1))
        return self.proj((weights @ values).transpose(1, 2).reshape(b, num_tokens, -1))


class MHAEinsum(torch.nn.Module):
    """Multiplies by `W` where the comment says `W^T`: the weights lie as (in, out)."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_out // num_heads
        self.W_query = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.W_key = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.W_value = torch.nn.Parameter(torch.randn(d_out, d_in))
        self.register_parameter("bias_q", None)
        self.out_proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))

    def forward(self, x):
        b, n, _ = x.shape
        weights = (self.W_query, self.W_key, self.W_value)
        parts = (torch.einsum("bnd,do->bno", x, w) for w in weights)
        q, k, v = (y.view(b, n, self.num_heads, self.head_dim).transpose(1, 2) for y in parts)
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k) / self.head_dim**0.5
        scores = scores.masked_fill(self.mask[:n, :n].bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.einsum("bhnm,bhmd->bhnd", weights, v)
        return self.out_proj(context.transpose(1, 2).reshape(b, n, -1))


WIDE = (11, 6, 9, 0.5)
W = "{W_query,W_key,W_value}"
X = (2, 7, 11)  # shorter than the context
# Theirs, ours, rules, shape of x, constants.
PAIRS = {
    "v1": (SelfAttention_v1, (11, 4), fa.SelfAttentionV1, (11, 4), (), X, ()),
    "v2": (SelfAttention_v2, (11, 4), fa.SelfAttentionV2, (11, 4), (), X, ()),
    "v2, W_keys": (
        *(SelfAttention_v2_W_keys, (11, 4, True), fa.SelfAttentionV2, (11, 4, True)),
        *((Rule("W_keys -> W_key"),), X, ()),
    ),
    "v2 in v1": (
        *(SelfAttention_v2, (11, 4), fa.SelfAttentionV1, (11, 4)),
        *((Rule("*.weight -> *", "o i -> i o"),), X, ()),
    ),
    "casual": (CasualAttention, WIDE, fa.CausalAttention, WIDE, (), X, ("mask",)),
    "head": (Head, (4,), fa.SingleHeadAttention, (11, 4), (), X, ("tril",)),
}
