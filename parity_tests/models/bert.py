"""BERT: an encoder of learned positions, post-norm layers, exact GELU and a tied head.

The port of `transformers.BertForMaskedLM` (Devlin et al., 2019).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_attn import Dense, Mask, attend, merge_heads, split_heads
from flax_attn.taps import tap

from .parts import Embed, cross_entropy


@dataclass(frozen=True)
class Config:
    """Sizes, by the names that `transformers.BertConfig` has for them."""

    vocab_size: int  # V
    type_vocab_size: int
    max_position_embeddings: int
    hidden_size: int  # D
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int  # N
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0


class Embeddings(nnx.Module):
    """`LayerNorm(word + type + position)`; looking up the padding word teaches it nothing."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        width = c.hidden_size
        self.word_embeddings = Embed(c.vocab_size, width, rngs, c.pad_token_id)
        self.position_embeddings = Embed(c.max_position_embeddings, width, rngs)
        self.token_type_embeddings = Embed(c.type_vocab_size, width, rngs)
        self.LayerNorm = norm(c, rngs)

    def __call__(self, ids: Int[Array, "B T"], types: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        positions = jnp.arange(ids.shape[1])[None]  # 1 T
        x = self.word_embeddings(ids) + self.token_type_embeddings(types)  # B T D
        return self.LayerNorm(x + self.position_embeddings(positions))


class SelfAttention(nnx.Module):
    """`attend(query(x), key(x), value(x))`."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.head_dim = c.hidden_size // c.num_attention_heads
        self.query = nnx.Linear(c.hidden_size, c.hidden_size, rngs=rngs)
        self.key = nnx.Linear(c.hidden_size, c.hidden_size, rngs=rngs)
        self.value = nnx.Linear(c.hidden_size, c.hidden_size, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)  # B T N H
        return merge_heads(attend(q, k, v, mask=mask))


class Output(nnx.Module):
    """`LayerNorm(dense(x) + residual)`."""

    def __init__(self, width: int, c: Config, rngs: nnx.Rngs):
        self.dense = nnx.Linear(width, c.hidden_size, rngs=rngs)
        self.LayerNorm = norm(c, rngs)

    def __call__(
        self, x: Float[Array, "B T F"], residual: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nnx.Module):
    """Attention, then the MLP, each followed by residual and norm."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.attention = SelfAttention(c, rngs)
        self.attention_output = Output(c.hidden_size, c, rngs)
        self.up = nnx.Linear(c.hidden_size, c.intermediate_size, rngs=rngs)
        self.output = Output(c.intermediate_size, c, rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        x = self.attention_output(self.attention(x, mask), x)
        return self.output(tap("intermediate", jax.nn.gelu(self.up(x), approximate=False)), x)


class Transform(nnx.Module):
    """`LayerNorm(gelu(dense(x)))`, before the head."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        self.dense = nnx.Linear(c.hidden_size, c.hidden_size, rngs=rngs)
        self.LayerNorm = norm(c, rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.LayerNorm(jax.nn.gelu(self.dense(x), approximate=False))


class BertForMaskedLM(nnx.Module):
    """Logits of every token, by the table that the tokens came from, and the loss of labels.

    Shapes: ids, types, labels `B T`, labels -100 where they do not count; real `B T`, False at
    padding. The same nest of modules as the original's, with fewer shells.

    >>> model = BertForMaskedLM(Config(29, 5, 11, 12, 17, 1, 3), rngs=nnx.Rngs(0))
    >>> ids = jnp.arange(4).reshape(1, 4)
    >>> model(ids, ids >= 0, ids, ids)["logits"].shape
    (1, 4, 29)
    """

    def __init__(self, c: Config, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(c, rngs)
        self.layer = nnx.List([Layer(c, rngs) for _ in range(c.num_hidden_layers)])
        self.transform = Transform(c, rngs)
        self.bias = nnx.Param(jnp.zeros(c.vocab_size))

    def __call__(
        self,
        ids: Int[Array, "B T"],
        real: Bool[Array, "B T"],
        types: Int[Array, "B T"],
        labels: Int[Array, "B T"],
    ) -> dict[str, Array]:
        x = self.embeddings(ids, types)  # B T D
        for layer in self.layer:
            x = layer(x, Dense(real[:, None, None, :]))  # the mask: B 1 1 S
        logits = self.embeddings.word_embeddings.attend(self.transform(x))  # B T V
        logits = tap("decoder", logits + self.bias[None, None])
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def norm(c: Config, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm of the hidden states, its variance taken about the mean."""
    return nnx.LayerNorm(
        c.hidden_size, epsilon=c.layer_norm_eps, use_fast_variance=False, rngs=rngs
    )
