"""Attention with other masks than the causal one."""

import torch
from torch import nn
from torch.nn import functional as F

from .subject import Subject, attention_truth, drawn, free_sizes, pick, takes_tokens


class MaskedAttention(nn.Module):
    """Subclasses say which keys a query attends to, or compute the heads' outputs themselves."""

    def __init__(self, width, heads, head_dim, number):
        super().__init__()
        self.width, self.heads, self.head_dim, self.number = width, heads, head_dim, number
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x):
        split = (*x.shape[:2], self.heads, self.head_dim)
        q = self.q_proj(x).view(split).transpose(1, 2)
        k = self.k_proj(x).view(split).transpose(1, 2)
        v = self.v_proj(x).view(split).transpose(1, 2)
        return self.o_proj(self.mix(q, k, v).transpose(1, 2).flatten(2))

    def mix(self, q, k, v):
        i = torch.arange(q.shape[2])
        logits = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        logits = logits.masked_fill(~self.visible(i[:, None], i[None, :]), -torch.inf)
        return torch.softmax(logits, dim=-1) @ v


class ChunkedCausal(MaskedAttention):
    def visible(self, q, k):
        return (q >= k) & (q // self.number == k // self.number)


class PrefixAttention(MaskedAttention):
    def visible(self, q, k):
        return (k <= q) | (k < self.number)


class StridedLocal(MaskedAttention):
    """Scale one, and a window cut out of two triangles."""

    def mix(self, q, k, v):
        ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.uint8)
        local = torch.bitwise_xor(ones.tril(), ones.tril(-self.number))
        weights = torch.matmul(q, k.transpose(-1, -2))
        weights = torch.where(local.bool(), weights, torch.finfo(q.dtype).min)
        return torch.matmul(F.softmax(weights, dim=-1), v)


class BlockedLocal(MaskedAttention):
    """No mask of all pairs: padded to whole blocks, which become an axis."""

    def mix(self, q, k, v):
        length, block = q.shape[2], self.number
        extra = -length % block
        q, k, v = (F.pad(y, (0, 0, 0, extra)).unflatten(2, (-1, block)) for y in (q, k, v))
        real = F.pad(torch.ones(length, dtype=torch.bool), (0, extra)).view(-1, 1, block)
        dots = torch.einsum("bhwid,bhwjd->bhwij", q, k) * self.head_dim**-0.5
        attn = dots.masked_fill(~real, torch.finfo(dots.dtype).min).softmax(-1)
        return torch.einsum("bhwij,bhwjd->bhwid", attn, v).flatten(2, 3)[:, :, :length]


class TiledCausal(MaskedAttention):
    """Tiles of keys one after another, with a running maximum and sum."""

    def mix(self, q, k, v):
        length = q.shape[2]
        top = torch.full_like(q[..., :1], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        row = torch.arange(length)[:, None]
        for start in range(0, length, self.number):
            keys, values = (
                k[:, :, start : start + self.number],
                v[:, :, start : start + self.number],
            )
            column = torch.arange(start, start + keys.shape[2])[None]
            s = q @ keys.mT / self.head_dim**0.5
            s = s.masked_fill(column > row, -torch.inf)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            p, shrink = torch.exp(s - new_top), torch.exp(top - new_top)
            total, out = total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ values
            top = new_top
        return out / total


class TokenLoop(MaskedAttention):
    """One query at a time attends to a slice of the keys."""

    def mix(self, q, k, v):
        outputs = []
        for t in range(q.shape[2]):
            first = max(0, t - self.number)
            keys, values = k[:, :, first : t + 1], v[:, :, first : t + 1]
            logits = (q[:, :, t : t + 1] * keys).sum(-1) / self.head_dim**0.5
            outputs.append((logits.softmax(-1)[..., None] * values).sum(2))
        return torch.stack(outputs, dim=2)


class LookAhead(MaskedAttention):
    """All earlier keys and a few later ones, by tril with an offset in a float mask."""

    def mix(self, q, k, v):
        keep = torch.ones(q.shape[2], q.shape[2], dtype=q.dtype).tril(self.number)
        logits = torch.einsum("bhqd,bhkd->bhqk", q, k) / self.head_dim**0.5
        logits = logits + (1.0 - keep) * -10000.0
        return torch.einsum("bhqk,bhkd->bhqd", logits.softmax(-1), v)


def subject(name, kind, numbers, mask, style, **more):
    def truth(m):
        return attention_truth(m.width, m.heads, m.head_dim, mask=mask(m.number), **more)

    make = drawn(lambda rng: kind(*free_sizes(rng), pick(rng, *numbers)))
    return Subject(name, make, takes_tokens("width"), truth, style)


RANGES = [
    subject(
        "chunked_causal",
        ChunkedCausal,
        (3, 4, 5),
        lambda n: f"CAUSAL & Chunked({n})",
        "chunks of positions by floor division",
    ),
    subject(
        "prefix_lm",
        PrefixAttention,
        (2, 3, 4),
        lambda n: f"CAUSAL | Prefix({n})",
        "the first keys are visible to all",
    ),
    subject(
        "local_unscaled",
        StridedLocal,
        (2, 3, 4),
        lambda n: f"CAUSAL & Window({n - 1}, 0)",
        "scale one, window by xor of two triangles",
        scale=1.0,
    ),
    subject(
        "blocks_as_axis",
        BlockedLocal,
        (3, 4, 5),
        lambda n: f"Chunked({n})",
        "padded to whole blocks, which are an axis of the einsum",
    ),
    subject(
        "tiles_of_keys",
        TiledCausal,
        (3, 4),
        lambda n: "CAUSAL",
        "running maximum and sum over tiles of keys",
    ),
    subject(
        "one_query_at_a_time",
        TokenLoop,
        (2, 3),
        lambda n: f"CAUSAL & Window({n}, 0)",
        "a loop over queries with slices of keys",
    ),
    subject(
        "look_ahead",
        LookAhead,
        (1, 2, 3),
        lambda n: f"Window(None, {n})",
        "tril with an offset, -10000 where masked",
    ),
]
