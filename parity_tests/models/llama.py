"""Llama: a decoder of grouped-query attention, rotary positions, RMSNorm and gated MLPs.

The port of `transformers.LlamaForCausalLM` (Touvron et al., 2023).
"""

from dataclasses import dataclass

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_attn import CAUSAL, Dense, GroupedQueryAttention, Mask, Rotary
from flax_attn.taps import tap

from .parts import Embed, next_token_loss


@dataclass(frozen=True)
class Config:
    """Sizes, by the names that `transformers.LlamaConfig` has for them."""

    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # N
    num_key_value_heads: int  # K
    head_dim: int  # H
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0


class Mlp(nnx.Module):
    """`down_proj(silu(gate_proj(x)) * up_proj(x))`."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        wide = c.intermediate_size
        self.gate_proj = nnx.Linear(c.hidden_size, wide, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(c.hidden_size, wide, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(wide, c.hidden_size, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = tap("act_fn", jax.nn.silu(self.gate_proj(x)))
        return self.down_proj(gate * self.up_proj(x))


class Layer(nnx.Module):
    """Attention, then the MLP; each reads a normed stream and adds to it."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.input_layernorm = norm(c, rngs)
        self.self_attn = GroupedQueryAttention(
            c.hidden_size,
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
            rotary=Rotary(c.rope_theta),
            rngs=rngs,
        )
        self.post_attention_layernorm = norm(c, rngs)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        x = x + self.self_attn(self.input_layernorm(x), mask=mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Tokens to normed hidden states."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, rngs)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.num_hidden_layers)])
        self.norm = norm(c, rngs)

    def __call__(self, ids: Int[Array, "B T"], mask: Mask) -> Float[Array, "B T D"]:
        x = self.embed_tokens(ids)  # B T D
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class LlamaForCausalLM(nnx.Module):
    """Logits of the next token, and the loss of labels.

    Shapes: ids, labels `B T`, labels -100 where they do not count; real `B T`, False at padding.

    >>> model = LlamaForCausalLM(Config(29, 14, 17, 1, 6, 3, 4), rngs=nnx.Rngs(0))
    >>> ids = jax.numpy.arange(5).reshape(1, 5)
    >>> model(ids, ids >= 0, ids)["logits"].shape
    (1, 5, 29)
    """

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.model = Llama(c, rngs)
        self.lm_head = nnx.Linear(c.hidden_size, c.vocab_size, use_bias=False, rngs=rngs)

    def __call__(
        self, ids: Int[Array, "B T"], real: Bool[Array, "B T"], labels: Int[Array, "B T"]
    ) -> dict[str, Array]:
        mask = CAUSAL & Dense(real[:, None, None, :])  # B 1 1 S
        logits = self.lm_head(self.model(ids, mask))  # B T V
        return {"loss": next_token_loss(logits, labels), "logits": logits}


def norm(c: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """An RMSNorm of the hidden states."""
    return nnx.RMSNorm(c.hidden_size, epsilon=c.rms_norm_eps, rngs=rngs)
