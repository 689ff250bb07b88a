"""The transformer of the trial: two pre-norm layers of grouped-query attention, in torch alone."""

import pytest

from .transformer_sizes import BASE, CAP, LAYER_EPS, RATE, RMS_EPS, Sizes

torch = pytest.importorskip("torch", reason="the harness compares with torch")
nn = torch.nn


def rotate(x, positions):
    """Halves (x1, x2) turned by position * BASE^(-2i/h); x is B N T h, positions T or B T."""
    half = x.shape[-1] // 2
    speed = BASE ** (-torch.arange(half, dtype=x.dtype) / half)  # h/2
    angle = positions[..., None].to(x.dtype) * speed  # T h/2
    angle = angle if positions.ndim == 1 else angle[:, None]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat(
        [x1 * angle.cos() - x2 * angle.sin(), x2 * angle.cos() + x1 * angle.sin()], dim=-1
    )


def slopes(heads, dtype):
    """ALiBi's 2^(-8 n / N), n from 1."""
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=dtype) / heads)


class Attention(nn.Module):
    """Causal over memory and tokens, softcapped, with ALiBi, rotary positions and dropout."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.z = z
        self.q_proj = nn.Linear(z.D, z.N * z.h)
        self.k_proj = nn.Linear(z.D, z.K * z.h)
        self.v_proj = nn.Linear(z.D, z.K * z.h)
        self.o_proj = nn.Linear(z.N * z.h, z.D)
        self.dropout = nn.Dropout(RATE)

    def forward(self, x, memory, there):
        z, all_keys = self.z, torch.cat([memory, x], dim=1)  # B S D
        q = self.q_proj(x).unflatten(-1, (z.N, z.h)).transpose(1, 2)  # B N T h
        k = self.k_proj(all_keys).unflatten(-1, (z.K, z.h)).transpose(1, 2)  # B K S h
        v = self.v_proj(all_keys).unflatten(-1, (z.K, z.h)).transpose(1, 2)  # B K S h
        rows, columns = torch.arange(z.M, z.S), torch.arange(z.S)
        q, k = rotate(q, rows), rotate(k, columns)
        k, v = (y.repeat_interleave(z.G, dim=1) for y in (k, v))  # B N S h
        scores = q @ k.transpose(-2, -1) / z.h**0.5  # B N T S
        scores = CAP * torch.tanh(scores / CAP)
        distance = rows[:, None] - columns  # T S
        scores = scores - slopes(z.N, x.dtype)[:, None, None] * distance
        hidden = (distance < 0) | ~there[:, None, None]  # B 1 T S
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1)
        mixed = self.dropout(weights) @ v  # B N T h
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(z.D, z.F), nn.GELU(), nn.Linear(z.F, z.D)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Layer(nn.Module):
    """Both halves behind a norm and beside a skip."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(z.D, eps=LAYER_EPS), Attention(z)
        self.norm2, self.mlp = nn.RMSNorm(z.D, eps=RMS_EPS), MLP(z)

    def forward(self, x, memory, there):
        x = x + self.attn(self.norm1(x), memory, there)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Embedding, layers, norm and head: logits and the best token."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.embed = nn.Embedding(z.V, z.D)
        self.layers = nn.ModuleList([Layer(z) for _ in range(z.L)])
        self.norm = nn.LayerNorm(z.D, eps=LAYER_EPS)
        self.head = nn.Linear(z.D, z.V)

    def forward(self, tokens, memory, there):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, memory, there)
        logits = self.head(self.norm(x))
        return {"logits": logits, "best": logits.argmax(-1)}


class Step(nn.Module):
    """One token attends to a ring of S slots into which it first writes its own key and value."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.z = z
        self.q_proj = nn.Linear(z.D, z.N * z.h)
        self.k_proj = nn.Linear(z.D, z.K * z.h)
        self.v_proj = nn.Linear(z.D, z.K * z.h)
        self.o_proj = nn.Linear(z.N * z.h, z.D)

    def forward(self, x, cache_k, cache_v, before):
        z = self.z
        q = rotate(self.q_proj(x).unflatten(-1, (z.N, z.h)).transpose(1, 2), before[:, None])
        k = rotate(self.k_proj(x).unflatten(-1, (z.K, z.h)).transpose(1, 2), before[:, None])
        v = self.v_proj(x).unflatten(-1, (z.K, z.h))  # B 1 K h
        slots = torch.arange(z.S)
        here = (slots == before[:, None] % z.S)[..., None, None]  # B S 1 1
        cache_k = torch.where(here, k.transpose(1, 2), cache_k)  # B S K h
        cache_v = torch.where(here, v, cache_v)
        keys, values = (
            c.repeat_interleave(z.G, dim=2).transpose(1, 2) for c in (cache_k, cache_v)
        )  # B N S h
        scores = q @ keys.transpose(-2, -1) / z.h**0.5  # B N 1 S
        unwritten = (slots > before[:, None])[:, None, None]  # B 1 1 S
        weights = torch.softmax(scores.masked_fill(unwritten, -torch.inf), dim=-1)
        out = self.o_proj((weights @ values).transpose(1, 2).flatten(-2))
        return {"out": out, "cache_k": cache_k, "cache_v": cache_v, "before": before + 1}


class Statistics(nn.Module):
    """Batch normalisation and a projection."""

    def __init__(self, z: Sizes):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(z.D), nn.Linear(z.D, z.V)

    def forward(self, x):
        return self.out(self.norm(x))
