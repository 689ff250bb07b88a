"""Attention with sinks, gates, clamps, softcaps, and other ways to write the softmax."""

import torch
from torch import nn
from torch.nn import functional as F

from .norms import OffsetRMSNorm
from .subject import (
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    free_sizes,
    grouped_sizes,
    norm_truth,
    pick,
    takes_tokens,
)


class SinkColumn(nn.Module):
    """The sinks are one more column of logits, which is cut off after the softmax."""

    def __init__(self, hidden, heads, kv_heads, head_dim, window):
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.window = window
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask = torch.full((t, t), -torch.inf, dtype=x.dtype).triu(1)
        if self.window:
            mask = mask + torch.full((t, t), -torch.inf, dtype=x.dtype).tril(-self.window)
        logits = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5 + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, t, -1)
        combined = torch.cat([logits, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        scores = F.softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
        return self.o_proj(torch.matmul(scores, v).transpose(1, 2).reshape(b, t, -1))


class SinkDenominator(nn.Module):
    """The sinks' exponentials are added to the sum."""

    def __init__(self, d, heads, head_dim):
        super().__init__()
        self.d, self.heads, self.head_dim = d, heads, head_dim
        self.proj_in = nn.Linear(d, 3 * heads * head_dim, bias=False)
        self.proj_out = nn.Linear(heads * head_dim, d, bias=False)
        self.sink = nn.Parameter(torch.zeros(heads, 1, 1))

    def forward(self, x):
        q, k, v = self.proj_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        z = q @ k.mT * self.head_dim**-0.5
        top = torch.maximum(z.amax(-1, keepdim=True), self.sink)
        e = torch.exp(z - top)
        p = e / (e.sum(-1, keepdim=True) + torch.exp(self.sink - top))
        return self.proj_out((p @ v).transpose(1, 2).flatten(2))


class FusedGate(nn.Module):
    """Each head's q and gate come from one projection; norms with gains of 1 + w."""

    def __init__(self, hidden, heads, kv_heads, head_dim):
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim * 2, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = OffsetRMSNorm(head_dim, 1e-6), OffsetRMSNorm(head_dim, 1e-6)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, gate = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim * 2).chunk(2, dim=-1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2)
        return self.o_proj(y * torch.sigmoid(gate.reshape(y.shape)))


class OwnGate(nn.Module):
    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_dim
        self.to_qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.to_gates = nn.Linear(dim, heads * head_dim)
        self.to_out = nn.Linear(heads * head_dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (y.view(b, n, self.heads, -1) for y in self.to_qkv(x).chunk(3, dim=-1))
        sim = torch.einsum("bihd,bjhd->bhij", q * self.head_dim**-0.5, k)
        out = torch.einsum("bhij,bjhd->bihd", sim.softmax(dim=-1), v).reshape(b, n, -1)
        return self.to_out(self.to_gates(x).sigmoid() * out)


class Clipped(nn.Module):
    """q, k and v of separate projections are clamped in place."""

    def __init__(self, width, heads, head_dim, clip):
        super().__init__()
        self.width, self.heads, self.head_dim, self.clip = width, heads, head_dim, clip
        self.att_proj = nn.ModuleList(nn.Linear(width, heads * head_dim) for _ in range(3))
        self.attn_out = nn.Linear(heads * head_dim, width)

    def forward(self, x):
        q, k, v = (proj(x) for proj in self.att_proj)
        if self.clip is not None:
            for y in (q, k, v):
                y.clamp_(-self.clip, self.clip)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attn_out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Softcapped(nn.Module):
    """Logits are capped at each call, then masked."""

    def __init__(self, n_embd, n_head, d_head, cap, constant):
        super().__init__()
        self.n_embd, self.n_head, self.d_head = n_embd, n_head, d_head
        self.cap, self.constant = cap, constant
        self.queries = nn.Linear(n_embd, n_head * d_head, bias=False)
        self.keys = nn.Linear(n_embd, n_head * d_head, bias=False)
        self.values = nn.Linear(n_embd, n_head * d_head, bias=False)
        self.unify = nn.Linear(n_head * d_head, n_embd)

    def forward(self, x):
        b, t, _ = x.size()
        parts = (self.queries(x) * self.constant, self.keys(x), self.values(x))
        q, k, v = (
            y.view(b, t, self.n_head, -1).transpose(1, 2).reshape(b * self.n_head, t, -1)
            for y in parts
        )
        dot = self.cap * (torch.bmm(q, k.transpose(1, 2)) / self.cap).tanh()
        rows, columns = torch.triu_indices(t, t, offset=1)
        dot[:, rows, columns] = float("-inf")
        out = torch.bmm(dot.softmax(2), v).view(b, self.n_head, t, -1)
        return self.unify(out.transpose(1, 2).reshape(b, t, -1))


class KeyWithoutBias(nn.Module):
    """Both q and k are multiplied by head_dim ** -0.25."""

    def __init__(self, n_state, n_head, causal):
        super().__init__()
        self.n_state, self.n_head, self.causal = n_state, n_head, causal
        self.query, self.key = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state, bias=False)
        self.value, self.out = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)

    def forward(self, x):
        length, scale = x.shape[1], (self.n_state // self.n_head) ** -0.25
        q = self.query(x).view(*x.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = self.key(x).view(*x.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = self.value(x).view(*x.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if self.causal:
            qk = qk + torch.empty(length, length, dtype=x.dtype).fill_(-torch.inf).triu_(1)
        w = F.softmax(qk, dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


def build_key_without_bias(rng):
    heads, head_dim = even_sizes(rng)
    return KeyWithoutBias(heads * head_dim, heads, pick(rng, True, False))


class RepeatedKeys(nn.Module):
    """Biases of q, k and v alone; the softmax is written with exp and sum."""

    def __init__(self, hidden, heads, kv_heads, head_dim):
        super().__init__()
        self.hidden, self.heads, self.kv_heads, self.head_dim = hidden, heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, -1)
        k = (
            self.k_proj(x)
            .view(b, t, self.kv_heads, -1)
            .repeat_interleave(self.heads // self.kv_heads, dim=2)
        )
        v = (
            self.v_proj(x)
            .view(b, t, self.kv_heads, -1)
            .repeat_interleave(self.heads // self.kv_heads, dim=2)
        )
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        visible = torch.ones(t, t, dtype=x.dtype).tril()
        logits = logits * visible - 1e9 * (1 - visible)
        unnormalised = torch.exp(logits - logits.max(-1, keepdim=True)[0])
        weights = unnormalised / torch.sum(unnormalised, dim=-1, keepdim=True)
        return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class SharedKeyValue(nn.Module):
    """One head of keys and values, no head axis on them; weights by logsumexp."""

    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_dim
        self.to_q = nn.Linear(dim, heads * head_dim, bias=False)
        self.to_k, self.to_v = nn.Linear(dim, head_dim), nn.Linear(dim, head_dim)
        self.to_out = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x):
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        k, v = self.to_k(x), self.to_v(x)
        sim = torch.einsum("bihd,bjd->bhij", q, k) / self.head_dim**0.5
        attn = torch.exp(sim - torch.logsumexp(sim, dim=-1, keepdim=True))
        return self.to_out(torch.einsum("bhij,bjd->bihd", attn, v).flatten(-2))


def sized(module, **more):
    return attention_truth(module.hidden, module.heads, module.head_dim, **more)


OPTIONS = [
    Subject(
        "sinks_as_column",
        drawn(lambda rng: SinkColumn(*grouped_sizes(rng), pick(rng, 0, 3))),
        takes_tokens("hidden"),
        lambda m: sized(
            m,
            kv_heads=m.kv_heads,
            biases="qkvo",
            mask=f"CAUSAL & Window({m.window - 1}, 0)" if m.window else "CAUSAL",
            sinks=True,
        ),
        "one more column of logits, biases everywhere, window in some",
    ),
    Subject(
        "sinks_in_denominator",
        drawn(lambda rng: SinkDenominator(*free_sizes(rng))),
        takes_tokens("d"),
        lambda m: attention_truth(m.d, m.heads, m.head_dim, sinks=True),
        "exp and sum, with the sink's exponential added",
    ),
    Subject(
        "gate_in_query_projection",
        drawn(lambda rng: FusedGate(*grouped_sizes(rng))),
        takes_tokens("hidden"),
        lambda m: sized(
            m,
            kv_heads=m.kv_heads,
            mask="CAUSAL",
            q_norm=norm_truth("rms", 1e-6, gain="1 + w"),
            k_norm=norm_truth("rms", 1e-6, gain="1 + w"),
            gate="sigmoid",
        ),
        "q and gate of each head in one Linear",
    ),
    Subject(
        "gate_of_its_own",
        drawn(lambda rng: OwnGate(*free_sizes(rng))),
        takes_tokens("dim"),
        lambda m: attention_truth(m.dim, m.heads, m.head_dim, biases="o", gate="sigmoid"),
        "a Linear with bias for the gate",
    ),
    Subject(
        "clip_in_place",
        drawn(lambda rng: Clipped(*free_sizes(rng), pick(rng, None, 0.8, 2.0))),
        takes_tokens("width"),
        lambda m: attention_truth(
            m.width, m.heads, m.head_dim, biases="qkvo", mask="CAUSAL", clip=m.clip
        ),
        "clamp_ of three projections in a list, in some",
    ),
    Subject(
        "softcap_tanh",
        drawn(lambda rng: Softcapped(*free_sizes(rng), pick(rng, 1.0, 3.0), pick(rng, 0.25, 0.5))),
        takes_tokens("n_embd"),
        lambda m: attention_truth(
            m.n_embd,
            m.n_head,
            m.d_head,
            biases="o",
            scale=m.constant,
            softcap=m.cap,
            mask="CAUSAL",
        ),
        "query times a constant, bmm, tanh, masked by triu_indices",
    ),
    Subject(
        "key_without_bias",
        drawn(build_key_without_bias),
        takes_tokens("n_state"),
        lambda m: attention_truth(
            m.n_state,
            m.n_head,
            m.n_state // m.n_head,
            biases="qvo",
            mask="CAUSAL" if m.causal else "FULL",
        ),
        "the scale's root on q and on k",
    ),
    Subject(
        "softmax_by_exp",
        drawn(lambda rng: RepeatedKeys(*grouped_sizes(rng))),
        takes_tokens("hidden"),
        lambda m: sized(m, kv_heads=m.kv_heads, biases="qkv", mask="CAUSAL"),
        "exp over sum, mask by products, repeat_interleave",
    ),
    Subject(
        "softmax_by_logsumexp",
        drawn(lambda rng: SharedKeyValue(*free_sizes(rng))),
        takes_tokens("dim"),
        lambda m: attention_truth(m.dim, m.heads, m.head_dim, kv_heads=1, biases="kv"),
        "one head of keys and values without head axis",
    ),
]
