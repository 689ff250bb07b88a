"""GPT-2: a decoder of learned positions, pre-norm blocks, tanh GELU and a tied head.

The port of `transformers.GPT2LMHeadModel` (Radford et al., 2019).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_attn import CAUSAL, Dense, Mask, attend, merge_heads, split_heads
from flax_attn.taps import tap

from .parts import Embed, next_token_loss


@dataclass(frozen=True)
class Config:
    """Sizes, by the names that `transformers.GPT2Config` has for them."""

    vocab_size: int  # V
    n_positions: int
    n_embd: int  # D
    n_inner: int
    n_layer: int
    n_head: int  # N
    layer_norm_epsilon: float = 1e-5


class Attention(nnx.Module):
    """`c_proj(attend(q, k, v))`, q, k and v one projection's three parts."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.head_dim = c.n_embd // c.n_head
        self.c_attn = nnx.Linear(c.n_embd, 3 * c.n_embd, rngs=rngs)
        self.c_proj = nnx.Linear(c.n_embd, c.n_embd, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        parts = jnp.split(self.c_attn(x), 3, axis=-1)  # B T D, three times
        q, k, v = (split_heads(part, self.head_dim) for part in parts)  # B T N H
        return self.c_proj(merge_heads(attend(q, k, v, mask=mask)))


class Mlp(nnx.Module):
    """`c_proj(gelu(c_fc(x)))`, the GELU by tanh."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.c_fc = nnx.Linear(c.n_embd, c.n_inner, rngs=rngs)
        self.c_proj = nnx.Linear(c.n_inner, c.n_embd, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.c_proj(tap("act", jax.nn.gelu(self.c_fc(x), approximate=True)))


class Block(nnx.Module):
    """Attention, then the MLP; each reads a normed stream and adds to it."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.ln_1 = norm(c, rngs)
        self.attn = Attention(c, rngs)
        self.ln_2 = norm(c, rngs)
        self.mlp = Mlp(c, rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class Transformer(nnx.Module):
    """Tokens to normed hidden states."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.wte = Embed(c.vocab_size, c.n_embd, rngs)
        self.wpe = Embed(c.n_positions, c.n_embd, rngs)
        self.h = nnx.List([Block(c, rngs) for _ in range(c.n_layer)])
        self.ln_f = norm(c, rngs)

    def __call__(self, ids: Int[Array, "B T"], mask: Mask) -> Float[Array, "B T D"]:
        positions = jnp.arange(ids.shape[1])[None]  # 1 T
        x = self.wte(ids) + self.wpe(positions)  # B T D
        for block in self.h:
            x = block(x, mask)
        return self.ln_f(x)


class GPT2LMHeadModel(nnx.Module):
    """Logits of the next token, by the table that the tokens came from, and the loss of labels.

    Shapes: ids, labels `B T`, labels -100 where they do not count; real `B T`, False at padding.

    >>> model = GPT2LMHeadModel(Config(29, 11, 15, 17, 1, 3), rngs=nnx.Rngs(0))
    >>> ids = jnp.arange(5).reshape(1, 5)
    >>> model(ids, ids >= 0, ids)["logits"].shape
    (1, 5, 29)
    """

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.transformer = Transformer(c, rngs)

    def __call__(
        self, ids: Int[Array, "B T"], real: Bool[Array, "B T"], labels: Int[Array, "B T"]
    ) -> dict[str, Array]:
        mask = CAUSAL & Dense(real[:, None, None, :])  # B 1 1 S
        logits = self.transformer.wte.attend(self.transformer(ids, mask))  # B T V
        logits = tap("lm_head", logits)
        return {"loss": next_token_loss(logits, labels), "logits": logits}


def norm(c: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm of the hidden states, its variance taken about the mean."""
    return nnx.LayerNorm(c.n_embd, epsilon=c.layer_norm_epsilon, use_fast_variance=False, rngs=rngs)
