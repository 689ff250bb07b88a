"""Attention for long or for other sequences: Longformer, Nystromformer, Perceiver, Reformer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn import Additive as bias_of
from flax_attn import Dense, Window, attend, attention_weights, merge_heads, split_heads

from .stranger import linear, normal, padded, stranger

B, T = 5, 8
REAL = padded([8, 6, 5, 7, 8], T)
GLOBAL = np.zeros((B, T), bool)
GLOBAL[np.arange(B), [0, 2, 4, 1, 7]] = True
GLOBAL[0, 5] = True  # one has two


class Longformer(nnx.Module):
    """A window of two each side and the global tokens; these look at all by weights of their own.

    Padded queries give zeros.
    """

    head_dim = 6

    def __init__(self, *, rngs: nnx.Rngs):
        for name in ("query", "key", "value", "query_global", "key_global", "value_global"):
            setattr(self, name, linear(18, 18, rngs))

    def __call__(self, x: jax.Array, real: jax.Array, is_global: jax.Array) -> jax.Array:
        parts = self.query(x), self.key(x), self.value(x)
        far = self.query_global(x), self.key_global(x), self.value_global(x)
        keys, everybody = is_global[:, None, None], real[:, None, None]  # B 1 1 S
        near = (Window(2, 2) & Dense(everybody)) | Dense(keys)
        near = near & Dense(real[:, None, :, None])
        local = attend(*(split_heads(part, self.head_dim) for part in parts), mask=near)
        wide = attend(*(split_heads(part, self.head_dim) for part in far), mask=Dense(everybody))
        return merge_heads(jnp.where(is_global[..., None, None], wide, local))


def longformer() -> torch.nn.Module:
    from transformers.models.longformer.modeling_longformer import (
        LongformerConfig,
        LongformerSelfAttention,
    )

    config = LongformerConfig(
        hidden_size=18,
        num_attention_heads=3,
        attention_window=[4],
        attention_probs_dropout_prob=0.0,
    )
    return LongformerSelfAttention(config, 0)


def call_longformer(module: torch.nn.Module, x: Any, real: Any, is_global: Any) -> torch.Tensor:
    kind = torch.zeros(real.shape, dtype=x.dtype).masked_fill(~real, -10000.0)
    kind = kind.masked_fill(is_global, 10000.0)
    return module(x, kind, ~real, is_global, True)[0]


class Nystromformer(nnx.Module):
    """`softmax(q k'^T) softmax(q' k'^T)^+ softmax(q' k^T) v` with two landmarks, and a convolution.

    The inverse in the middle is Newton's, six steps, and starts from the largest column of all.
    """

    head_dim, landmarks = 6, 2

    def __init__(self, *, rngs: nnx.Rngs):
        self.query, self.key, self.value = (linear(18, 18, rngs) for _ in range(3))
        self.conv = nnx.Conv(
            3, 3, (3, 1), padding=((1, 1), (0, 0)), feature_group_count=3, use_bias=False, rngs=rngs
        )

    def inverse(self, a: jax.Array) -> jax.Array:
        """Of `B N L L`, nearly."""
        one = jnp.eye(self.landmarks, dtype=a.dtype)[None, None]
        z = a.mT / a.sum(axis=-2).max()
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
        return z

    def __call__(self, x: jax.Array, hidden: jax.Array) -> jax.Array:
        q, k, v = (
            split_heads(part(x), self.head_dim) for part in (self.query, self.key, self.value)
        )
        few_q, few_k = (
            y.reshape(len(y), self.landmarks, -1, *y.shape[2:]).mean(axis=2) for y in (q, k)
        )
        first, middle = attention_weights(q, few_k), attention_weights(few_q, few_k)
        last = attend(few_q, k, v, score=bias_of(hidden))  # B L N H
        out = jnp.einsum("bntl,blnh->btnh", first @ self.inverse(middle), last)
        return merge_heads(out + jnp.moveaxis(self.conv(jnp.moveaxis(v, 2, -1)), -1, 2))


def nystromformer() -> torch.nn.Module:
    from transformers.models.nystromformer.modeling_nystromformer import (
        NystromformerConfig,
        NystromformerSelfAttention,
    )

    config = NystromformerConfig(
        hidden_size=18,
        num_attention_heads=3,
        num_landmarks=2,
        segment_means_seq_len=T,
        conv_kernel_size=3,
        attention_probs_dropout_prob=0.0,
    )
    return NystromformerSelfAttention(config)


class Perceiver(nnx.Module):
    """Few latents look at many inputs; five widths, two norms; its weights are an output too."""

    heads = 3

    def __init__(self, *, rngs: nnx.Rngs):
        self.layernorm1 = nnx.LayerNorm(10, epsilon=1e-5, rngs=rngs)
        self.layernorm2 = nnx.LayerNorm(14, epsilon=1e-5, rngs=rngs)
        self.query, self.key = linear(10, 12, rngs), linear(14, 12, rngs)
        self.value = linear(14, 21, rngs)

    def __call__(self, x: jax.Array, inputs: jax.Array, seen: jax.Array) -> Any:
        inputs = self.layernorm2(inputs)
        q, k = split_heads(self.query(self.layernorm1(x)), 4), split_heads(self.key(inputs), 4)
        v, mask = split_heads(self.value(inputs), 7), Dense(seen[:, None, None])
        return merge_heads(attend(q, k, v, mask=mask)), attention_weights(q, k, mask=mask)


def perceiver() -> torch.nn.Module:
    from transformers.models.perceiver.modeling_perceiver import (
        PerceiverConfig,
        PerceiverSelfAttention,
    )

    return PerceiverSelfAttention(
        PerceiverConfig(attention_probs_dropout_prob=0.0),
        is_cross_attention=True,
        qk_channels=12,
        v_channels=21,
        num_heads=3,
        q_dim=10,
        kv_dim=14,
    )


def call_perceiver(module: torch.nn.Module, x: Any, inputs: Any, seen: Any) -> Any:
    hidden = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, float("-inf"))
    return module(x, None, inputs, hidden[:, None, None], output_attentions=True)


class Reformer(nnx.Module):
    """Reformer's local attention: a token sees its chunk of two and the one before it."""

    head_dim, chunk = 6, 2

    def __init__(self, *, rngs: nnx.Rngs):
        self.query, self.key, self.value = (linear(18, 18, rngs, False) for _ in range(3))

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        q, k, v = (
            split_heads(part(x), self.head_dim) for part in (self.query, self.key, self.value)
        )
        at = np.arange(T)
        back = at[:, None] // self.chunk - at // self.chunk
        near = (back >= 0) & (back <= 1) & (at[:, None] >= at)
        seen = near[None, None] & real[:, None, None]
        return merge_heads(attend(q, k, v, mask=Dense(seen)))


def reformer() -> torch.nn.Module:
    from transformers.models.reformer.modeling_reformer import LocalSelfAttention, ReformerConfig

    config = ReformerConfig(
        hidden_size=18,
        num_attention_heads=3,
        attention_head_size=6,
        local_attn_chunk_length=2,
        local_num_chunks_before=1,
        local_num_chunks_after=0,
        local_attention_probs_dropout_prob=0.0,
        is_decoder=True,
        attn_layers=["local"],
    )
    return LocalSelfAttention(config)


def call_reformer(module: torch.nn.Module, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return module(x, attention_mask=real)[0]


STRANGERS = {
    "longformer": stranger(
        longformer,
        Longformer,
        lambda: {"x": normal(B, T, 18), "real": REAL, "is_global": GLOBAL},
        torch_call=call_longformer,
    ),
    "nystromformer": stranger(
        nystromformer,
        Nystromformer,
        lambda: {"x": normal(B, T, 18), "hidden": np.where(REAL, 0.0, -30.0)[:, None, None]},
        torch_call=lambda module, x, hidden: module(x, hidden)[0],
    ),
    "perceiver": stranger(
        perceiver,
        Perceiver,
        lambda: {"x": normal(B, 4, 10), "inputs": normal(B, T, 14, seed=1), "seen": REAL},
        torch_call=call_perceiver,
    ),
    "reformer_local": stranger(
        reformer,
        Reformer,
        lambda: {"x": normal(B, T, 18), "real": REAL},
        torch_call=call_reformer,
    ),
}
