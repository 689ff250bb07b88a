"""Logits that know how far a key is: DeBERTa, XLNet, Funnel, Conformer, and their masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn import Additive as bias_of
from flax_attn import Dense, attend, merge_heads, split_heads

from .stranger import additive, first, linear, normal, padded, stranger, zeros

B, T = 5, 7
LOOKS = np.random.RandomState(3).rand(B, 1, T, T) < 0.6  # asymmetric in every axis
LOOKS |= np.eye(T, dtype=bool)  # no row is empty


class Deberta(nnx.Module):
    """DeBERTa v2: content to place and place to content, each with logits of its own projection."""

    width, head_dim, span = 18, 3, 4

    def __init__(self, *, rngs: nnx.Rngs):
        for name in ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj"):
            setattr(self, name, linear(self.width, self.width, rngs))

    def bias(self, q: jax.Array, k: jax.Array, places: jax.Array) -> jax.Array:
        """`B N T S`: what query and key say to the place of the other."""
        far = bucket(np.arange(T)[:, None] - np.arange(T), self.span, 16)  # T S
        last = 2 * self.span - 1
        keys = split_heads(self.pos_key_proj(places), self.head_dim)  # 2P N H
        queries = split_heads(self.pos_query_proj(places), self.head_dim)
        keys = keys[np.clip(far + self.span, 0, last)]  # T S N H
        queries = queries[np.clip(self.span - far.T, 0, last)]  # T S N H
        return jnp.einsum("btnh,tsnh->bnts", q, keys) + jnp.einsum("bsnh,tsnh->bnts", k, queries)

    def __call__(self, x: jax.Array, seen: jax.Array, places: jax.Array) -> jax.Array:
        parts = self.query_proj(x), self.key_proj(x), self.value_proj(x)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)  # B T N H
        scale = (3 * self.head_dim) ** -0.5  # of three kinds of logits
        score = bias_of(self.bias(q, k, places) * scale)
        return merge_heads(attend(q, k, v, mask=Dense(seen), score=score, scale=scale))


def bucket(far: np.ndarray, count: int, longest: int) -> np.ndarray:
    """Near distances as they are, far ones by their logarithm, with their sign."""
    half = count // 2
    size = np.where((far < half) & (far > -half), half - 1, np.abs(far))
    grows = np.log(np.maximum(size, 1) / half) / np.log((longest - 1) / half) * (half - 1)
    return np.where(size <= half, far, (np.ceil(grows) + half) * np.sign(far)).astype(int)


def deberta() -> torch.nn.Module:
    from transformers.models.deberta_v2.modeling_deberta_v2 import (
        DebertaV2Config,
        DisentangledSelfAttention,
    )

    config = DebertaV2Config(
        hidden_size=18,
        num_attention_heads=6,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        max_relative_positions=16,
    )
    return DisentangledSelfAttention(config)


def call_deberta(module: torch.nn.Module, x: Any, seen: Any, places: Any) -> torch.Tensor:
    return module(x, seen, rel_embeddings=places)[0]


class XLNet(nnx.Module):
    """Plain weights `D N H`, positions before the batch, three terms in the logits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.q, self.k, self.v, self.o, self.r = (zeros(18, 3, 6) for _ in range(5))
        self.r_w_bias, self.r_r_bias, self.r_s_bias = (zeros(3, 6) for _ in range(3))
        self.seg_embed = zeros(2, 3, 6)
        self.layer_norm = nnx.LayerNorm(18, epsilon=1e-12, rngs=rngs)

    def bias(self, q: jax.Array, r: jax.Array, segments: jax.Array) -> jax.Array:
        """`B N T S`: of places and of segments, before the scale."""
        at = jnp.einsum("lbd,dnh->lbnh", r, self.r[...])  # 2T B N H
        far = T - np.arange(T)[:, None] + np.arange(T)  # T S: which of the 2T places
        places = jnp.einsum("btnh,tsbnh->bnts", q + self.r_r_bias[...][None, None], at[far])
        kinds = jnp.einsum(
            "btnh,gnh->btng", q + self.r_s_bias[...][None, None], self.seg_embed[...]
        )
        return places + jnp.einsum("tsbg,btng->bnts", segments, kinds)

    def __call__(
        self, x: jax.Array, mask: jax.Array, r: jax.Array, segments: jax.Array
    ) -> jax.Array:
        q, k, v = (jnp.einsum("tbd,dnh->btnh", x, w[...]) for w in (self.q, self.k, self.v))
        hidden = bias_of(-1e30 * jnp.moveaxis(mask, (2, 3), (0, 1)))  # B 1 T S
        score = bias_of(self.bias(q, r, segments) * 6**-0.5) >> hidden
        out = attend(q + self.r_w_bias[...][None, None], k, v, score=score)
        return self.layer_norm(jnp.einsum("btnh,dnh->tbd", out, self.o[...]) + x)


def xlnet() -> torch.nn.Module:
    from transformers.models.xlnet.modeling_xlnet import XLNetConfig, XLNetRelativeAttention

    return XLNetRelativeAttention(XLNetConfig(d_model=18, n_head=3, dropout=0.0))


def call_xlnet(module: torch.nn.Module, x: Any, mask: Any, r: Any, segments: Any) -> torch.Tensor:
    return module(x, None, mask, None, r, segments)[0]


def xlnet_inputs() -> dict[str, Any]:
    """The mask is floating, one where a query may not look; segments are one-hot."""
    mask = 1.0 - np.moveaxis(LOOKS, (0, 1), (2, 3))  # T S B 1
    segments = np.random.RandomState(5).randint(0, 2, (T, T, B))
    return {
        "x": normal(T, B, 18),
        "mask": mask,
        "r": normal(2 * T, B, 18, seed=1),
        "segments": np.eye(2)[segments],
    }


class Funnel(nnx.Module):
    """Factorised places: `sum (q W_r) (phi psi + pi omega)`, and a bias for tokens of one type."""

    head_dim, heads, width = 5, 3, 18

    def __init__(self, *, rngs: nnx.Rngs):
        inner = self.head_dim * self.heads
        self.q_head = linear(self.width, inner, rngs, False)
        self.k_head, self.v_head = (linear(self.width, inner, rngs) for _ in range(2))
        self.r_w_bias, self.r_r_bias, self.r_s_bias = (zeros(3, 5) for _ in range(3))
        self.r_kernel, self.seg_embed = zeros(18, 3, 5), zeros(2, 3, 5)
        self.post_proj = linear(inner, self.width, rngs)
        self.layer_norm = nnx.LayerNorm(self.width, epsilon=1e-9, rngs=rngs)

    def places(self, q: jax.Array, at: tuple[jax.Array, ...]) -> jax.Array:
        """`B N T S`, from four tables of sines and cosines."""
        phi, pi, psi, omega = at  # T D, T D, S D, S D
        turned = jnp.einsum(
            "btnh,dnh->btnd", q + self.r_r_bias[...][None, None], self.r_kernel[...]
        )
        seen = jnp.einsum("btnd,td,sd->bnts", turned, phi, psi)
        return seen + jnp.einsum("btnd,td,sd->bnts", turned, pi, omega)

    def types(self, q: jax.Array, same: jax.Array) -> jax.Array:
        """`B N T S`: one of two numbers a query, by whether the key is of its type."""
        kinds = jnp.einsum(
            "btnh,gnh->bntg", q + self.r_s_bias[...][None, None], self.seg_embed[...]
        )
        return jnp.where(same[:, None], kinds[..., 1:], kinds[..., :1])

    def __call__(self, x: jax.Array, context: jax.Array, attention_inputs: Any) -> jax.Array:
        at, same, real, cls = attention_inputs
        q = split_heads(self.q_head(x), self.head_dim)
        k, v = (split_heads(part(context), self.head_dim) for part in (self.k_head, self.v_head))
        bias = (self.places(q, at) + self.types(q, same)) * cls[None, None]
        score = bias_of(bias * self.head_dim**-0.5 - 1e6 * (1 - real)[:, None, None])
        out = attend(q + self.r_w_bias[...][None, None], k, v, score=score)
        return self.layer_norm(x + self.post_proj(merge_heads(out)))


def funnel() -> torch.nn.Module:
    from transformers.models.funnel.modeling_funnel import (
        FunnelConfig,
        FunnelRelMultiheadAttention,
    )

    config = FunnelConfig(
        d_model=18,
        n_head=3,
        d_head=5,
        attention_type="factorized",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return FunnelRelMultiheadAttention(config, 0)


def call_funnel(module: torch.nn.Module, x: Any, context: Any, attention_inputs: Any) -> Any:
    return module(x, context, context, attention_inputs)[0]


def funnel_inputs() -> dict[str, Any]:
    """Four pooled queries of seven keys; everything else in one nest of tuples."""
    far, near = 4, T
    tables = tuple(normal(length, 18, seed=i) for i, length in enumerate((far, far, near, near)))
    same = np.random.RandomState(6).rand(B, far, near) < 0.5
    real = padded([7, 6, 4, 7, 5], near).astype(float)
    cls = np.ones((far, near))
    cls[0], cls[:, 0] = 0, 0
    return {
        "x": normal(B, far, 18, seed=7),
        "context": normal(B, near, 18, seed=8),
        "attention_inputs": (tables, same, real, cls),
    }


class Conformer(nnx.Module):
    """Wav2Vec2-Conformer: places as in Transformer-XL, 2T - 1 of them, shared by the batch."""

    head_dim = 6

    def __init__(self, *, rngs: nnx.Rngs):
        for name in ("linear_q", "linear_k", "linear_v", "linear_out"):
            setattr(self, name, linear(18, 18, rngs))
        self.linear_pos = linear(18, 18, rngs, False)
        self.pos_bias_u, self.pos_bias_v = zeros(3, 6), zeros(3, 6)

    def __call__(self, x: jax.Array, places: jax.Array, seen: jax.Array) -> jax.Array:
        parts = self.linear_q(x), self.linear_k(x), self.linear_v(x)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)
        at = split_heads(self.linear_pos(places)[0], self.head_dim)  # 2T-1 N H
        far = T - 1 - np.arange(T)[:, None] + np.arange(T)  # T S
        bias = jnp.einsum("btnh,tsnh->bnts", q + self.pos_bias_v[...][None, None], at[far])
        score = bias_of(bias * self.head_dim**-0.5)
        q = q + self.pos_bias_u[...][None, None]
        return self.linear_out(merge_heads(attend(q, k, v, mask=Dense(seen), score=score)))


def conformer() -> torch.nn.Module:
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
        Wav2Vec2ConformerConfig,
        Wav2Vec2ConformerSelfAttention,
    )

    config = Wav2Vec2ConformerConfig(
        hidden_size=18,
        num_attention_heads=3,
        position_embeddings_type="relative",
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    return Wav2Vec2ConformerSelfAttention(config)


def call_conformer(module: torch.nn.Module, x: Any, places: Any, seen: Any) -> torch.Tensor:
    return module(x, additive(seen, x), places)[0]


class MPNet(nnx.Module):
    """A bias shared by all layers comes in from outside, and so does the padding, as floats."""

    head_dim = 3

    def __init__(self, *, rngs: nnx.Rngs):
        for name in "qkvo":
            setattr(self, name, linear(18, 18, rngs))

    def __call__(self, x: jax.Array, real: jax.Array, position_bias: jax.Array) -> jax.Array:
        q, k, v = (split_heads(part(x), self.head_dim) for part in (self.q, self.k, self.v))
        hidden = (1 - real)[:, None, None] * jnp.finfo(x.dtype).min  # B 1 1 S
        score = bias_of(position_bias) >> bias_of(hidden)
        return self.o(merge_heads(attend(q, k, v, score=score)))


def mpnet() -> torch.nn.Module:
    from transformers.models.mpnet.modeling_mpnet import MPNetConfig, MPNetSelfAttention

    config = MPNetConfig(hidden_size=18, num_attention_heads=6, attention_probs_dropout_prob=0.0)
    return MPNetSelfAttention(config)


def call_mpnet(module: torch.nn.Module, x: Any, real: Any, position_bias: Any) -> torch.Tensor:
    hidden = (1.0 - real)[:, None, None] * torch.finfo(x.dtype).min
    return module(x, hidden, position_bias)[0]


class LayoutLMv3(nnx.Module):
    """Two biases, in one dimension and in two, under the scale; the mask is added as it is given.

    Theirs lowers each row by its largest logit first, which leaves no trace.
    """

    head_dim = 6

    def __init__(self, *, rngs: nnx.Rngs):
        self.query, self.key, self.value = (linear(18, 18, rngs) for _ in range(3))

    def __call__(
        self,
        hidden_states: jax.Array,
        attention_mask: jax.Array,
        rel_pos: jax.Array,
        rel_2d_pos: jax.Array,
    ) -> jax.Array:
        parts = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)
        score = bias_of((rel_pos + rel_2d_pos) * self.head_dim**-0.5) >> bias_of(attention_mask)
        return merge_heads(attend(q, k, v, score=score))


def layoutlm() -> torch.nn.Module:
    from transformers.models.layoutlmv3.modeling_layoutlmv3 import (
        LayoutLMv3Config,
        LayoutLMv3SelfAttention,
    )

    config = LayoutLMv3Config(
        hidden_size=18,
        num_attention_heads=3,
        attention_probs_dropout_prob=0.0,
        has_relative_attention_bias=True,
        has_spatial_attention_bias=True,
    )
    return LayoutLMv3SelfAttention(config)


def layoutlm_inputs() -> dict[str, Any]:
    """An additive mask as an input, of numbers that float32 still has."""
    lowest = float(np.finfo(np.float32).min) / 2
    return {
        "hidden_states": normal(B, T, 18),
        "attention_mask": np.where(padded([7, 6, 4, 7, 5], T), 0.0, lowest)[:, None, None],
        "rel_pos": normal(B, 3, T, T, seed=1),
        "rel_2d_pos": normal(B, 3, T, T, seed=2),
    }


STRANGERS = {
    "deberta_v2": stranger(
        deberta,
        Deberta,
        lambda: {"x": normal(B, T, 18), "seen": LOOKS, "places": normal(8, 18, seed=1)},
        torch_call=call_deberta,
    ),
    "xlnet": stranger(xlnet, XLNet, xlnet_inputs, torch_call=call_xlnet, constants=("mask",)),
    "funnel": stranger(
        funnel,
        Funnel,
        funnel_inputs,
        torch_call=call_funnel,
        constants=("attention_inputs[2]",),
    ),
    "conformer": stranger(
        conformer,
        Conformer,
        lambda: {"x": normal(B, T, 18), "places": normal(1, 2 * T - 1, 18, seed=1), "seen": LOOKS},
        torch_call=call_conformer,
    ),
    "mpnet": stranger(
        mpnet,
        MPNet,
        lambda: {
            "x": normal(B, T, 18),
            "real": padded([7, 6, 4, 7, 5], T).astype(float),
            "position_bias": normal(B, 6, T, T, seed=1),
        },
        torch_call=call_mpnet,
        constants=("real",),
    ),
    "layoutlmv3": stranger(
        layoutlm,
        LayoutLMv3,
        layoutlm_inputs,
        torch_call=first,
        constants=("attention_mask",),
    ),
}
