"""Attention with earlier keys and values, and attention to a context."""

import torch
from torch import nn
from torch.nn import functional as F

from .subject import (
    BATCH,
    Subject,
    attention_truth,
    drawn,
    free_sizes,
    grouped_sizes,
    pick,
    rotary_truth,
    tokens,
)


class PastAttention(nn.Module):
    """Returns its output and the pair of keys and values for the next call."""

    def __init__(self, nx, n_head, head_dim):
        super().__init__()
        self.nx, self.n_head, self.head_dim = nx, n_head, head_dim
        self.q, self.k = nn.Linear(nx, n_head * head_dim), nn.Linear(nx, n_head * head_dim)
        self.v, self.proj = nn.Linear(nx, n_head * head_dim), nn.Linear(n_head * head_dim, nx)

    def forward(self, x, past=None):
        q, k, v = (
            f(x).unflatten(-1, (self.n_head, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        if past is not None:
            k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        queries, keys = q.shape[-2], k.shape[-2]
        w = torch.matmul(q, k.transpose(-1, -2)) / self.head_dim**0.5
        visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        w = torch.where(visible, w, torch.finfo(w.dtype).min).softmax(-1)
        return self.proj(torch.matmul(w, v).transpose(1, 2).flatten(2)), (k, v)


def past_inputs(module, rng, length):
    if pick(rng, True, False):
        return (tokens(rng, length, module.nx),), {"past": None}
    shape = (BATCH, module.n_head, 9, module.head_dim)
    past = (rng.standard_normal(shape), rng.standard_normal(shape))
    return (tokens(rng, length, module.nx),), {"past": past}


class SlotCache(nn.Module):
    """Keys and values are written into buffers at `input_pos`; the mask has a row per slot."""

    def __init__(self, dim, n_head, n_local_heads, head_dim):
        super().__init__()
        self.dim, self.n_head, self.n_local_heads, self.head_dim = (
            dim,
            n_head,
            n_local_heads,
            head_dim,
        )
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * head_dim, bias=False)
        self.wo = nn.Linear(n_head * head_dim, dim, bias=False)
        shape = (BATCH, n_local_heads, 19, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("causal_mask", torch.ones(19, 19, dtype=torch.bool).tril())
        rates = 10000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        angles = torch.outer(torch.arange(19).double(), rates)
        self.register_buffer("freqs", torch.stack((angles.cos(), angles.sin()), -1))

    def turn(self, x, freqs):
        x = x.unflatten(-1, (-1, 2))
        cos, sin = freqs[:, None, :, 0], freqs[:, None, :, 1]
        a, b = x[..., 0], x[..., 1]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(3)

    def forward(self, x, input_pos):
        size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.n_head * self.head_dim, size, size], dim=-1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        q, k = self.turn(q, self.freqs[input_pos]), self.turn(k, self.freqs[input_pos])
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        groups = self.n_head // self.n_local_heads
        k, v = (y.repeat_interleave(groups, dim=1) for y in (self.k_cache, self.v_cache))
        y = F.scaled_dot_product_attention(q, k, v, self.causal_mask[None, None, input_pos])
        return self.wo(y.transpose(1, 2).flatten(2))


class ContextAttention(nn.Module):
    """Keys and values from a context of another width in one Linear, with an optional mask."""

    def __init__(self, query_dim, heads, dim_head, context_dim):
        super().__init__()
        self.query_dim, self.heads, self.dim_head = query_dim, heads, dim_head
        self.context_dim = context_dim
        self.to_q = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(context_dim, heads * dim_head * 2, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, query_dim), nn.Dropout(0.0))

    def forward(self, x, context, mask=None):
        b, n, h = x.shape[0], x.shape[1], self.heads
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (
            y.view(b, -1, h, self.dim_head).transpose(1, 2).reshape(b * h, -1, self.dim_head)
            for y in (q, k, v)
        )
        sim = torch.einsum("bid,bjd->bij", q, k) * self.dim_head**-0.5
        if mask is not None:
            keep = mask[:, None, None].expand(b, h, 1, -1).flatten(0, 1)
            sim = sim.masked_fill(~keep, -torch.finfo(sim.dtype).max)
        out = torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), v)
        return self.to_out(out.view(b, h, n, -1).transpose(1, 2).reshape(b, n, -1))


def context_inputs(module, rng, length):
    context = tokens(rng, length + 2, module.context_dim)
    mask = None
    if module.context_dim == module.query_dim:
        mask = rng.standard_normal((BATCH, length + 2)) < 0.8
        mask[:, 0] = True
    return (tokens(rng, length, module.query_dim),), {"context": context, "mask": mask}


def build_context(rng):
    width, heads, head_dim = free_sizes(rng)
    return ContextAttention(width, heads, head_dim, pick(rng, width, 14))


class ResidualCross(nn.Module):
    """Norms the queries alone, attends to the context, and adds the result to its input."""

    def __init__(self, d_model, n_head, d_head):
        super().__init__()
        self.d_model, self.n_head, self.d_head = d_model, n_head, d_head
        self.ln_1 = nn.LayerNorm(d_model)
        self.query = nn.Linear(d_model, n_head * d_head)
        self.key = nn.Linear(d_model, n_head * d_head)
        self.value = nn.Linear(d_model, n_head * d_head)
        self.out = nn.Linear(n_head * d_head, d_model)

    def forward(self, x, context):
        q = self.query(self.ln_1(x)).view(*x.shape[:2], self.n_head, -1)
        k, v = (
            f(context).view(*context.shape[:2], self.n_head, -1) for f in (self.key, self.value)
        )
        logits = torch.einsum("bqhd,bkhd->bqkh", q, k) / self.d_head**0.5
        return x + self.out(torch.einsum("bqkh,bkhd->bqhd", logits.softmax(2), v).flatten(2))


CACHED = [
    Subject(
        "past_pair",
        drawn(lambda rng: PastAttention(*free_sizes(rng))),
        past_inputs,
        lambda m: attention_truth(
            m.nx, m.n_head, m.head_dim, biases="qkvo", mask="Causal('end')", cache=True
        ),
        "past keys and values come in, or None; returns (y, (k, v))",
    ),
    Subject(
        "cache_of_slots",
        drawn(lambda rng: SlotCache(*grouped_sizes(rng))),
        lambda m, rng, length: ((tokens(rng, length, m.dim), torch.arange(length).numpy()), {}),
        lambda m: attention_truth(
            m.dim,
            m.n_head,
            m.head_dim,
            kv_heads=m.n_local_heads,
            mask="CAUSAL",
            rotary=rotary_truth(10000.0, m.head_dim, "neighbours"),
            cache=True,
        ),
        "writes into buffers at input_pos and attends to all slots",
    ),
    Subject(
        "cross_context",
        drawn(build_context),
        context_inputs,
        lambda m: attention_truth(
            m.query_dim,
            m.heads,
            m.dim_head,
            biases="o",
            mask="given" if m.context_dim == m.query_dim else "FULL",
            cross=True,
        ),
        "to_q and to_kv, context of another width, or with a mask of its padding",
    ),
    Subject(
        "cross_residual",
        drawn(lambda rng: ResidualCross(*free_sizes(rng))),
        lambda m, rng, length: (
            (tokens(rng, length, m.d_model),),
            {"context": tokens(rng, length + 2, m.d_model)},
        ),
        lambda m: attention_truth(
            m.d_model,
            m.n_head,
            m.d_head,
            biases="qkvo",
            cross=True,
            pre_norm=True,
            residual=True,
        ),
        "heads last in the logits, softmax over the third axis, norm and residual inside",
    ),
]
