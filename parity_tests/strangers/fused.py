"""One weight for queries, keys and values, which the ports split: equal and ragged parts."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from flax_attn import IDENTITY, Dense, Rotary, alibi_slopes, attend, merge_heads, split_heads
from flax_attn import Additive as bias_of
from flax_attn.parity import Rule
from flax_attn.scores import Score

from .stranger import additive, causal, linear, normal, padded, stranger

B, T = 5, 7
SEEN = causal(T) & padded([7, 6, 4, 7, 5], T)[:, None, None]  # B 1 T T


class Fused(nnx.Module):
    """`o(attend(rotary(q(x)), rotary(k(x)), v(x)))` with K key heads for N query heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, rotary: int = 0, rngs: nnx.Rngs):
        self.head_dim = width // heads
        self.rotary = Rotary(width=rotary)
        self.q = linear(width, width, rngs)
        self.k = linear(width, kv_heads * self.head_dim, rngs)
        self.v = linear(width, kv_heads * self.head_dim, rngs)
        self.dense = linear(width, width, rngs)

    def score(self, length: int, dtype: Any) -> Score:
        """What is added to the logits."""
        return IDENTITY

    def __call__(self, x: jax.Array, seen: jax.Array) -> jax.Array:
        q, k, v = (split_heads(part(x), self.head_dim) for part in (self.q, self.k, self.v))
        score = self.score(x.shape[1], x.dtype)
        out = attend(self.rotary(q), self.rotary(k), v, mask=Dense(seen), score=score)
        return self.dense(merge_heads(out))


class FalconAlibi(Fused):
    """Falcon's linear bias by the key's place alone, in bfloat16, times the scale of the logits."""

    def score(self, length: int, dtype: Any) -> Score:
        slopes = jnp.asarray(alibi_slopes(self.dense.in_features // self.head_dim), jnp.bfloat16)
        bias = slopes[:, None] * jnp.arange(length, dtype=jnp.bfloat16)[None]  # N S
        return bias_of(bias.astype(dtype)[None, :, None] * self.head_dim**-0.5)


def inputs(width: int) -> dict[str, Any]:
    """Sequences of seven, causal and padded at their ends."""
    return {"x": normal(B, T, width), "seen": SEEN}


def rules(torchs: str, weight: str, **sizes: Any) -> tuple[Rule, ...]:
    """The fused weight and its bias, by the same layout."""
    left, right = weight.split(" -> ")
    return (
        Rule(f"{torchs}.weight -> {{q,k,v}}.kernel", f"{left} i -> n i {right}", **sizes),
        Rule(f"{torchs}.bias -> {{q,k,v}}.bias", f"{left} -> n {right}", **sizes),
    )


def gpt_neox() -> torch.nn.Module:
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXConfig

    config = GPTNeoXConfig(
        hidden_size=18,
        num_attention_heads=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        attn_implementation="eager",
    )
    return GPTNeoXAttention(config, layer_idx=0)


def call_gpt_neox(module: torch.nn.Module, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The rotary module is built in the call, so that its buffer is in the run's dtype."""
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    at = GPTNeoXRotaryEmbedding(module.config)(x, torch.arange(x.shape[1])[None])
    return module(x, attention_mask=additive(seen, x), position_embeddings=at)[0]


def falcon(**kind: Any) -> torch.nn.Module:
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconConfig

    config = FalconConfig(hidden_size=24, bias=True, attn_implementation="eager", **kind)
    return FalconAttention(config, layer_idx=0)


def call_falcon(module: torch.nn.Module, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    from transformers.models.falcon import modeling_falcon as falcons

    at, bias = None, None
    if module.config.alibi:
        real = torch.ones(x.shape[:2], dtype=torch.long)
        bias = falcons.build_alibi_tensor(real, module.num_heads, x.dtype)
    else:
        at = falcons.FalconRotaryEmbedding(module.config)(x, torch.arange(x.shape[1])[None])
    return module(x, bias, additive(seen, x), position_embeddings=at)[0]


def bigcode() -> torch.nn.Module:
    from transformers.models.gpt_bigcode.modeling_gpt_bigcode import (
        GPTBigCodeAttention,
        GPTBigCodeConfig,
    )

    config = GPTBigCodeConfig(
        n_embd=18,
        n_head=6,
        multi_query=True,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        attn_implementation="eager",
    )
    return GPTBigCodeAttention(config, layer_idx=0)


def call_bigcode(module: torch.nn.Module, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return module(x, attention_mask=additive(seen, x))[0]


STRANGERS = {
    "gpt_neox": stranger(
        gpt_neox,
        lambda rngs: Fused(18, 2, 2, rotary=4, rngs=rngs),
        lambda: inputs(18),
        lambda: rules("query_key_value", "(h n o) -> (h o)", h=2),
        call_gpt_neox,
    ),
    "falcon_grouped": stranger(
        lambda: falcon(num_attention_heads=6, num_kv_heads=2, new_decoder_architecture=True),
        lambda rngs: Fused(24, 6, 2, rotary=4, rngs=rngs),
        lambda: inputs(24),
        lambda: rules("query_key_value", "(k n o) -> (k o)", o=(12, 4, 4)),
        call_falcon,
    ),
    "falcon_multi_query": stranger(
        lambda: falcon(num_attention_heads=6, multi_query=True),
        lambda rngs: Fused(24, 6, 1, rotary=4, rngs=rngs),
        lambda: inputs(24),
        lambda: rules("query_key_value", "(n o) -> o", o=(24, 4, 4)),
        call_falcon,
    ),
    "falcon_alibi": stranger(
        lambda: falcon(num_attention_heads=12, multi_query=False, alibi=True),
        lambda rngs: FalconAlibi(24, 12, 12, rngs=rngs),
        lambda: inputs(24),
        lambda: rules("query_key_value", "(h n o) -> (h o)", h=12),
        call_falcon,
    ),
    "bigcode": stranger(
        bigcode,
        lambda rngs: Fused(18, 6, 1, rngs=rngs),
        lambda: inputs(18),
        lambda: (*rules("c_attn", "(n o) -> o", o=(18, 3, 3)), Rule("c_proj -> dense")),
        call_bigcode,
    ),
}
