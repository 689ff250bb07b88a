"""Attention with raw parameters, convolutions and modules of single heads as projections."""

import torch
from torch import nn

from .subject import (
    BATCH,
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    free_sizes,
    pick,
    takes_tokens,
)


class EinsumLetters(nn.Module):
    """Weights `(in, heads, head_dim)`, and `(heads, head_dim, in)` of the output."""

    def __init__(self, model, heads, head_dim, causal):
        super().__init__()
        self.model, self.heads, self.head_dim, self.causal = model, heads, head_dim, causal
        self.wq = nn.Parameter(torch.zeros(model, heads, head_dim))
        self.wk = nn.Parameter(torch.zeros(model, heads, head_dim))
        self.wv = nn.Parameter(torch.zeros(model, heads, head_dim))
        self.wo = nn.Parameter(torch.zeros(heads, head_dim, model))
        self.bq, self.bo = (
            nn.Parameter(torch.zeros(heads, head_dim)),
            nn.Parameter(torch.zeros(model)),
        )

    def forward(self, x):
        q = torch.einsum("bte,ehd->bthd", x, self.wq) + self.bq
        k = torch.einsum("bte,ehd->bthd", x, self.wk)
        v = torch.einsum("bte,ehd->bthd", x, self.wv)
        s = torch.einsum("bthd,bshd->bhts", q, k) / self.head_dim**0.5
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        y = torch.einsum("bhts,bshd->bthd", s.softmax(-1), v)
        return torch.einsum("bthd,hde->bte", y, self.wo) + self.bo


class OneLetter(nn.Module):
    """Matrices `(in, out)`, applied by `@`."""

    def __init__(self, d, h, w):
        super().__init__()
        self.d, self.h, self.w = d, h, w
        self.Q, self.K = nn.Parameter(torch.zeros(d, h * w)), nn.Parameter(torch.zeros(d, h * w))
        self.V, self.O = nn.Parameter(torch.zeros(d, h * w)), nn.Parameter(torch.zeros(h * w, d))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = ((x @ p).reshape(b, t, self.h, self.w) for p in (self.Q, self.K, self.V))
        a = (q[:, :, None] * k[:, None]).sum(-1) * self.w**-0.5
        a = a.softmax(2)
        return (a[..., None] * v[:, None]).sum(2).reshape(b, t, -1) @ self.O


class HeadsFirstParameters(nn.Module):
    """Weights `(heads, in, head_dim)` broadcast against tokens; heads are added up at the end."""

    def __init__(self, width, heads, size):
        super().__init__()
        self.width, self.heads, self.size = width, heads, size
        for name in ("query", "key", "value"):
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, width, size)))
        self.output = nn.Parameter(torch.zeros(heads, size, width))

    def forward(self, x):
        x = x[:, None]
        scores = (x @ self.query) @ (x @ self.key).transpose(-2, -1)
        length = scores.shape[-1]
        future = torch.arange(length)[None] > torch.arange(length)[:, None]
        scores[..., future] = float("-inf")
        mixed = torch.softmax(scores / self.size**0.5, dim=-1) @ (x @ self.value)
        return (mixed @ self.output).sum(dim=1)


class PointwiseConv(nn.Module):
    """Tokens are the last axis, and projections are convolutions of width one."""

    def __init__(self, channels, heads):
        super().__init__()
        self.channels, self.heads, self.ch = channels, heads, channels // heads
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, t = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=1)
        scale = self.ch**-0.25
        q = (q * scale).view(b * self.heads, self.ch, t)
        k = (k * scale).view(b * self.heads, self.ch, t)
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q, k), dim=-1)
        a = torch.einsum("bts,bcs->bct", weight, v.reshape(b * self.heads, self.ch, t))
        return self.proj_out(a.reshape(b, c, t))


class Conv1D(nn.Module):
    """A Linear with its weight the other way, `(in, out)`."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class OldGpt(nn.Module):
    """Its scale may also fall with the number of the layer."""

    def __init__(self, embed_dim, num_heads, layer_idx):
        super().__init__()
        self.embed_dim, self.num_heads, self.layer_idx = embed_dim, num_heads, layer_idx
        self.c_attn, self.c_proj = Conv1D(3 * embed_dim, embed_dim), Conv1D(embed_dim, embed_dim)
        self.register_buffer("bias", torch.ones(1, 1, 32, 32, dtype=torch.bool).tril())

    def forward(self, x):
        split = (*x.shape[:-1], self.num_heads, -1)
        q, k, v = (y.view(split).permute(0, 2, 1, 3) for y in self.c_attn(x).tensor_split(3, -1))
        weights = torch.matmul(q, k.transpose(-1, -2)) / v.size(-1) ** 0.5
        weights = weights / float(self.layer_idx + 1)
        lowest = torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype)
        visible = self.bias[:, :, : x.shape[1], : x.shape[1]]
        weights = nn.functional.softmax(torch.where(visible, weights, lowest), dim=-1)
        merged = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        return self.c_proj(merged.view(*x.shape[:-1], -1))


def build_old_gpt(rng):
    heads, head_dim = even_sizes(rng)
    return OldGpt(heads * head_dim, heads, pick(rng, 0, 1, 3))


class Head(nn.Module):
    def __init__(self, n_embd, head_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        T = x.shape[1]
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")).softmax(dim=-1)
        return self.dropout(wei) @ self.value(x)


class ListOfHeads(nn.Module):
    """Each head is a module; their outputs are concatenated."""

    def __init__(self, n_embd, num_heads, head_size, dropout):
        super().__init__()
        self.n_embd, self.head_size = n_embd, head_size
        self.heads = nn.ModuleList(Head(n_embd, head_size, dropout) for _ in range(num_heads))
        self.proj = nn.Linear(head_size * num_heads, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class LoopOverHeads(nn.Module):
    """One projection each, sliced head by head in a loop, with batch entries in another."""

    def __init__(self, size, count, per_head):
        super().__init__()
        self.size, self.count, self.per_head = size, count, per_head
        self.query_layer = nn.Linear(size, count * per_head)
        self.key_layer = nn.Linear(size, count * per_head)
        self.value_layer = nn.Linear(size, count * per_head)
        self.final_layer = nn.Linear(count * per_head, size)

    def forward(self, x):
        queries, keys, values = self.query_layer(x), self.key_layer(x), self.value_layer(x)
        rows = []
        for entry in range(x.shape[0]):
            heads = []
            for i in range(self.count):
                part = slice(i * self.per_head, (i + 1) * self.per_head)
                logits = torch.mm(queries[entry, :, part], keys[entry, :, part].t())
                weights = torch.softmax(logits.div(self.per_head**0.5), dim=1)
                heads.append(torch.mm(weights, values[entry, :, part]))
            rows.append(torch.cat(heads, dim=1))
        return self.final_layer(torch.stack(rows))


class SingleHead(nn.Module):
    """One head as wide as the model, no output projection, scores divided or not."""

    def __init__(self, d_in, d_out, scaled):
        super().__init__()
        self.d_in, self.d_out, self.scaled = d_in, d_out, scaled
        self.W_query = nn.Parameter(torch.zeros(d_in, d_out))
        self.W_key = nn.Parameter(torch.zeros(d_in, d_out))
        self.W_value = nn.Parameter(torch.zeros(d_in, d_out))

    def forward(self, x):
        keys, queries, values = x @ self.W_key, x @ self.W_query, x @ self.W_value
        attn_scores = queries @ keys.transpose(1, 2)
        scale = keys.shape[-1] ** 0.5 if self.scaled else 1.0
        return torch.softmax(attn_scores / scale, dim=-1) @ values


RAW = [
    Subject(
        "einsum_letters",
        drawn(lambda rng: EinsumLetters(*free_sizes(rng), pick(rng, True, False))),
        takes_tokens("model"),
        lambda m: attention_truth(
            m.model,
            m.heads,
            m.head_dim,
            biases="qo",
            mask="CAUSAL" if m.causal else "FULL",
        ),
        "einsum, parameters of three axes, biases of q and the output",
    ),
    Subject(
        "one_letter_matrices",
        drawn(lambda rng: OneLetter(*free_sizes(rng))),
        takes_tokens("d"),
        lambda m: attention_truth(m.d, m.h, m.w),
        "x @ Parameter, products and sums by broadcasting, heads last in the logits",
    ),
    Subject(
        "parameters_heads_first",
        drawn(lambda rng: HeadsFirstParameters(*free_sizes(rng))),
        takes_tokens("width"),
        lambda m: attention_truth(m.width, m.heads, m.size, mask="CAUSAL"),
        "parameters (heads, in, head_dim), masked by an assignment, heads summed at the end",
    ),
    Subject(
        "pointwise_conv",
        drawn(lambda rng: PointwiseConv((sizes := even_sizes(rng))[0] * sizes[1], sizes[0])),
        lambda m, rng, length: ((rng.standard_normal((BATCH, m.channels, length)),), {}),
        lambda m: attention_truth(m.channels, m.heads, m.ch, biases="qkvo"),
        "Conv1d of width one, channels first, the scale's root on q and on k",
    ),
    Subject(
        "transposed_linear",
        drawn(build_old_gpt),
        takes_tokens("embed_dim"),
        lambda m: attention_truth(
            m.embed_dim,
            m.num_heads,
            m.embed_dim // m.num_heads,
            biases="qkvo",
            scale=(m.embed_dim // m.num_heads) ** -0.5 / (m.layer_idx + 1),
            mask="CAUSAL",
        ),
        "weights (in, out) by addmm, scale falls with the layer in some",
    ),
    Subject(
        "list_of_heads",
        drawn(lambda rng: ListOfHeads(*free_sizes(rng), pick(rng, 0.0, 0.2))),
        takes_tokens("n_embd"),
        lambda m: attention_truth(
            m.n_embd,
            len(m.heads),
            m.head_size,
            biases="o",
            mask="CAUSAL",
            dropout=m.heads[0].dropout.p,
        ),
        "a module for each head, concatenated",
    ),
    Subject(
        "loop_over_heads",
        drawn(lambda rng: LoopOverHeads(*free_sizes(rng))),
        takes_tokens("size"),
        lambda m: attention_truth(m.size, m.count, m.per_head, biases="qkvo"),
        "Python loops over the batch and the heads, mm of slices",
    ),
    Subject(
        "single_head",
        drawn(lambda rng: SingleHead(22, pick(rng, 6, 10), pick(rng, True, False))),
        takes_tokens("d_in"),
        lambda m: attention_truth(m.d_in, 1, m.d_out, scale=None if m.scaled else 1.0),
        "one head without output projection, not scaled in some",
    ),
]
