"""T5's encoder: relative position bias in place of positions, RMSNorm, gated tanh GELU, no biases.

The port of `transformers.T5ForTokenClassification`, a linear head on `T5EncoderModel` (Raffel et
al., 2020; gated as in version 1.1).
"""

import math
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_attn import Additive, Dense, Mask, attend, merge_heads, split_heads
from flax_attn.scores import Score
from flax_attn.taps import tap

from .parts import Embed, cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes, by the names that `transformers.T5Config` has for them."""

    vocab_size: int
    num_labels: int  # V
    d_model: int  # D
    d_kv: int  # H
    d_ff: int
    num_layers: int
    num_heads: int  # N
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float = 1e-6


def bucket(distance: Int[np.ndarray, "*B"], buckets: int, longest: int) -> Int[np.ndarray, "*B"]:
    """The bucket of `key - query`: half for each side; near ones alone, far ones on a log scale.

    In float32, since the original's rounding decides at the borders of the far ones.

    >>> bucket(np.arange(-6, 7), 8, 6).tolist()
    [3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7]
    """
    side, near = buckets // 2, buckets // 4
    away = np.abs(distance)
    share = np.log(np.maximum(away, near).astype(np.float32) / near) / math.log(longest / near)
    far = np.minimum(near + (share * (side - near)).astype(int), side - 1)
    return side * (distance > 0) + np.where(away < near, away, far)


class SelfAttention(nnx.Module):
    """`o(attend(q, k, v))` with unscaled logits; the first layer's also holds the biases."""

    def __init__(self, c: Config, has_bias: bool, rngs: nnx.Rngs):
        width, self.c = c.num_heads * c.d_kv, c
        self.q = nnx.Linear(c.d_model, width, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(c.d_model, width, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(c.d_model, width, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(width, c.d_model, use_bias=False, rngs=rngs)
        if has_bias:
            number = c.relative_attention_num_buckets
            self.relative_attention_bias = Embed(number, c.num_heads, rngs)

    def bias(self, length: int) -> Score:
        """One number for each head and bucket, added to the logits."""
        c, at = self.c, np.arange(length)
        number, longest = c.relative_attention_num_buckets, c.relative_attention_max_distance
        table = self.relative_attention_bias(bucket(at - at[:, None], number, longest))  # T S N
        return Additive(table.transpose(2, 0, 1)[None])  # 1 N T S

    def __call__(self, x: Float[Array, "B T D"], mask: Mask, bias: Score) -> Float[Array, "B T D"]:
        parts = self.q(x), self.k(x), self.v(x)
        q, k, v = (split_heads(part, self.c.d_kv) for part in parts)  # B T N H
        return self.o(merge_heads(attend(q, k, v, mask=mask, score=bias, scale=1.0)))


class Mlp(nnx.Module):
    """`wo(gelu(wi_0(x)) * wi_1(x))`, the GELU by tanh."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.wi_0 = nnx.Linear(c.d_model, c.d_ff, use_bias=False, rngs=rngs)
        self.wi_1 = nnx.Linear(c.d_model, c.d_ff, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(c.d_ff, c.d_model, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.wo(tap("act", jax.nn.gelu(self.wi_0(x), approximate=True)) * self.wi_1(x))


class Block(nnx.Module):
    """Attention, then the MLP; each reads a normed stream and adds to it."""

    def __init__(self, c: Config, first: bool, rngs: nnx.Rngs):
        self.attention_norm = norm(c, rngs)
        self.attention = SelfAttention(c, first, rngs)
        self.mlp_norm = norm(c, rngs)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask, bias: Score) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_norm(x), mask, bias)
        return x + self.mlp(self.mlp_norm(x))


class T5ForTokenClassification(nnx.Module):
    """Logits of every token, and the loss of labels.

    Shapes: ids, labels `B T`, labels -100 where they do not count; real `B T`, False at padding.

    >>> model = T5ForTokenClassification(Config(29, 5, 14, 4, 17, 2, 3, 8, 6), rngs=nnx.Rngs(0))
    >>> ids = jax.numpy.arange(4).reshape(1, 4)
    >>> model(ids, ids >= 0, ids)["logits"].shape
    (1, 4, 5)
    """

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.embed_tokens = Embed(c.vocab_size, c.d_model, rngs)
        self.block = nnx.List([Block(c, i == 0, rngs) for i in range(c.num_layers)])
        self.final_layer_norm = norm(c, rngs)
        self.classifier = nnx.Linear(c.d_model, c.num_labels, rngs=rngs)

    def __call__(
        self, ids: Int[Array, "B T"], real: Bool[Array, "B T"], labels: Int[Array, "B T"]
    ) -> dict[str, Array]:
        x = self.embed_tokens(ids)  # B T D
        bias = self.block[0].attention.bias(ids.shape[1])
        for block in self.block:
            x = block(x, Dense(real[:, None, None, :]), bias)  # the mask: B 1 1 S
        logits = self.classifier(self.final_layer_norm(x))  # B T V
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def norm(c: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """An RMSNorm of the hidden states."""
    return nnx.RMSNorm(c.d_model, epsilon=c.layer_norm_epsilon, rngs=rngs)
