"""Attention by torch's fused functions: SDPA, flex_attention and MultiheadAttention."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .subject import (
    BATCH,
    Subject,
    attention_truth,
    drawn,
    even_sizes,
    free_sizes,
    grouped_sizes,
    pick,
    takes_sequence_first,
    takes_tokens,
    tokens,
)


class SdpaCausal(nn.Module):
    def __init__(self, width, heads, head_dim, dropout):
        super().__init__()
        self.width, self.heads, self.head_dim, self.dropout = width, heads, head_dim, dropout
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x):
        q, k, v = (
            proj(x).view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SdpaWindow(nn.Module):
    """A boolean mask, True where visible, from two comparisons of indices."""

    def __init__(self, width, heads, head_dim, window):
        super().__init__()
        self.width, self.heads, self.head_dim, self.window = width, heads, head_dim, window
        self.query = nn.Linear(width, heads * head_dim)
        self.key = nn.Linear(width, heads * head_dim)
        self.value = nn.Linear(width, heads * head_dim)
        self.output = nn.Linear(heads * head_dim, width, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(-2, -3)

    def forward(self, x):
        i = torch.arange(x.shape[1], device=x.device)
        visible = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < self.window)
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[None, None])
        return self.output(y.transpose(-2, -3).flatten(-2))


class SdpaFloatMask(nn.Module):
    """A float mask of both sides of a band, and muP's scale of 1 / d."""

    def __init__(self, width, heads, head_dim, reach):
        super().__init__()
        self.width, self.heads, self.head_dim, self.reach = width, heads, head_dim, reach
        self.to_q = nn.Linear(width, heads * head_dim)
        self.to_k = nn.Linear(width, heads * head_dim)
        self.to_v = nn.Linear(width, heads * head_dim)
        self.to_out = nn.Linear(heads * head_dim, width)

    def forward(self, x):
        b, t, _ = x.shape
        i = torch.arange(t)
        mask = torch.zeros(t, t, dtype=x.dtype)
        mask[(i[:, None] - i).abs() > self.reach] = float("-inf")
        shape = (b, t, self.heads, self.head_dim)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=1 / self.head_dim)
        return self.to_out(y.transpose(1, 2).reshape(b, t, -1))


class SdpaGrouped(nn.Module):
    def __init__(self, width, heads, kv_heads, head_dim, causal):
        super().__init__()
        self.width, self.heads, self.kv_heads, self.head_dim = width, heads, kv_heads, head_dim
        self.causal = causal
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wkv = nn.Linear(width, 2 * kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width)

    def forward(self, x):
        q = self.wq(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.wkv(x).unflatten(-1, (2, self.kv_heads, -1)).movedim(2, 0).transpose(2, 3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FlexAttention(nn.Module):
    """flex_attention outside a compiler; subclasses say what it masks and how it changes logits."""

    def __init__(self, dim, n_heads, head_dim, number):
        super().__init__()
        self.dim, self.n_heads, self.head_dim, self.number = dim, n_heads, head_dim, number
        self.qkv = nn.Linear(dim, 3 * n_heads * head_dim, bias=False)
        self.out = nn.Linear(n_heads * head_dim, dim, bias=False)

    def options(self, length):
        return {}

    def forward(self, x):
        qkv = self.qkv(x).view(x.shape[0], x.shape[1], 3, self.n_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).contiguous()
        y = flex_attention(q, k, v, **self.options(x.shape[1]))
        return self.out(y.transpose(1, 2).flatten(2))


class FlexWindow(FlexAttention):
    def options(self, length):
        def visible(b, h, q, k):
            return (q >= k) & (q - k <= self.number)

        block_mask = create_block_mask(visible, None, None, length, length, device="cpu")
        return {"block_mask": block_mask}


class FlexSoftcap(FlexAttention):
    def options(self, length):
        def capped(score, b, h, q, k):
            score = self.number * torch.tanh(score / self.number)
            return torch.where(q >= k, score, -float("inf"))

        return {"score_mod": capped, "scale": 0.5}


class FlexAlibi(FlexAttention):
    def options(self, length):
        heads = torch.arange(1, self.n_heads + 1, dtype=torch.float64)
        slopes = torch.exp2(-8 * heads / self.n_heads)

        def biased(score, b, h, q, k):
            return score + slopes[h] * (k - q)

        def causal(b, h, q, k):
            return q >= k

        block_mask = create_block_mask(causal, None, None, length, length, device="cpu")
        return {"score_mod": biased, "block_mask": block_mask}


def flex_truth(**more):
    return lambda m: attention_truth(
        m.dim, m.n_heads, m.head_dim, **{name: value(m) for name, value in more.items()}
    )


class WrappedMultihead(nn.Module):
    """torch's module with a causal mask of floats made at each call."""

    def __init__(self, dim, heads, bias, dropout):
        super().__init__()
        self.dim = dim
        self.mha = nn.MultiheadAttention(dim, heads, dropout, bias=bias, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.mha(x, x, x, attn_mask=mask, need_weights=False)[0]


def multihead_truth(m, **more):
    biases = "" if m.in_proj_bias is None else "qkvo"
    return attention_truth(
        m.embed_dim, m.num_heads, m.head_dim, biases=biases, dropout=m.dropout, **more
    )


def build_wrapped(rng):
    heads, head_dim = even_sizes(rng)
    return WrappedMultihead(heads * head_dim, heads, pick(rng, True, False), pick(rng, 0.0, 0.3))


def build_multihead(batch_first):
    def build(rng):
        heads, head_dim = even_sizes(rng)
        bias, dropout = pick(rng, True, False), pick(rng, 0.0, 0.1)
        return nn.MultiheadAttention(
            heads * head_dim, heads, dropout, bias=bias, batch_first=batch_first
        )

    return build


def three_times(module, rng, length):
    x = tokens(rng, length, module.embed_dim).swapaxes(0, 1)
    return (x, x, x), {"need_weights": False}


def with_padding(module, rng, length):
    x = tokens(rng, length, module.embed_dim)
    padding = rng.standard_normal((BATCH, length)) > 0.8
    padding[:, 0] = False
    return (x, x, x), {"key_padding_mask": padding}


def with_float_mask(module, rng, length):
    x = tokens(rng, length, module.embed_dim)
    return (x, x, x), {"attn_mask": rng.standard_normal((length, length))}


def with_other_keys(module, rng, length):
    x = tokens(rng, length, module.embed_dim)
    other = tokens(rng, length + 2, module.embed_dim)
    return (x, other, other), {"need_weights": False}


class SequenceFirst(nn.Module):
    """Batch and heads are one axis, and bmm multiplies; the query is scaled before."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        T, B, C = x.shape
        shape = (T, B * self.num_heads, self.head_dim)
        q = (self.q_proj(x) * self.head_dim**-0.5).view(shape).transpose(0, 1)
        k = self.k_proj(x).view(shape).transpose(0, 1)
        v = self.v_proj(x).view(shape).transpose(0, 1)
        weights = torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1)
        out = torch.bmm(weights, v).transpose(0, 1).contiguous().view(T, B, C)
        return self.out_proj(out)


def build_sequence_first(rng):
    heads, head_dim = even_sizes(rng)
    return SequenceFirst(heads * head_dim, heads)


def plain_truth(**more):
    return lambda m: attention_truth(
        m.width, m.heads, m.head_dim, **{name: value(m) for name, value in more.items()}
    )


def build_flex(kind, *numbers):
    return drawn(lambda rng: kind(*free_sizes(rng), pick(rng, *numbers)))


FUNCTIONAL = [
    Subject(
        "sdpa_is_causal",
        drawn(lambda rng: SdpaCausal(*free_sizes(rng), pick(rng, 0.0, 0.25))),
        takes_tokens("width"),
        plain_truth(mask=lambda m: "CAUSAL", dropout=lambda m: m.dropout),
        "separate Linear, is_causal, dropout_p in train mode",
    ),
    Subject(
        "sdpa_window_bool",
        drawn(lambda rng: SdpaWindow(*free_sizes(rng), pick(rng, 2, 3, 5))),
        takes_tokens("width"),
        plain_truth(mask=lambda m: f"CAUSAL & Window({m.window - 1}, 0)", biases=lambda m: "qkv"),
        "boolean mask of a sliding window",
    ),
    Subject(
        "sdpa_band_float",
        drawn(lambda rng: SdpaFloatMask(*free_sizes(rng), pick(rng, 1, 2, 4))),
        takes_tokens("width"),
        plain_truth(
            mask=lambda m: f"Window({m.reach}, {m.reach})",
            biases=lambda m: "qkvo",
            scale=lambda m: 1 / m.head_dim,
        ),
        "float mask of a band, scale 1 / d",
    ),
    Subject(
        "sdpa_enable_gqa",
        drawn(lambda rng: SdpaGrouped(*grouped_sizes(rng), pick(rng, True, False))),
        takes_tokens("width"),
        plain_truth(
            kv_heads=lambda m: m.kv_heads,
            mask=lambda m: "CAUSAL" if m.causal else "FULL",
            biases=lambda m: "o",
        ),
        "keys and values in one Linear, enable_gqa",
    ),
    Subject(
        "flex_window",
        build_flex(FlexWindow, 1, 3, 4),
        takes_tokens("dim"),
        flex_truth(mask=lambda m: f"CAUSAL & Window({m.number}, 0)"),
        "flex_attention with a block mask",
    ),
    Subject(
        "flex_softcap",
        build_flex(FlexSoftcap, 1.5, 4.0),
        takes_tokens("dim"),
        flex_truth(softcap=lambda m: m.number, mask=lambda m: "CAUSAL", scale=lambda m: 0.5),
        "flex_attention, softcap and mask in score_mod",
    ),
    Subject(
        "flex_alibi",
        drawn(lambda rng: FlexAlibi(pick(rng, 22, 26), 4, pick(rng, 6, 10), None)),
        takes_tokens("dim"),
        flex_truth(bias=lambda m: "alibi", mask=lambda m: "CAUSAL"),
        "flex_attention, slopes in score_mod",
    ),
    Subject(
        "multihead_wrapped_causal",
        drawn(build_wrapped),
        takes_tokens("dim"),
        lambda m: multihead_truth(m.mha, mask="CAUSAL"),
        "nn.MultiheadAttention, batch first, inside another module",
    ),
    Subject(
        "multihead_sequence_first",
        drawn(build_multihead(False)),
        three_times,
        multihead_truth,
        "nn.MultiheadAttention itself, sequence first, the same tensor three times",
    ),
    Subject(
        "multihead_padding",
        drawn(build_multihead(True)),
        with_padding,
        lambda m: multihead_truth(m, mask="given"),
        "nn.MultiheadAttention with key_padding_mask, which also returns weights",
    ),
    Subject(
        "multihead_float_mask",
        drawn(build_multihead(True)),
        with_float_mask,
        lambda m: multihead_truth(m, mask="given"),
        "nn.MultiheadAttention with attn_mask of finite floats",
    ),
    Subject(
        "multihead_cross",
        drawn(build_multihead(True)),
        with_other_keys,
        lambda m: multihead_truth(m, cross=True),
        "nn.MultiheadAttention with keys of another length",
    ),
    Subject(
        "sequence_first_bmm",
        drawn(build_sequence_first),
        takes_sequence_first("embed_dim"),
        lambda m: attention_truth(m.embed_dim, m.num_heads, m.head_dim, biases="qkvo"),
        "batch and heads as one axis, bmm, query scaled before the product",
    ),
]
