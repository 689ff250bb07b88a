"""Llama 4: chunked attention with a rotary, or full attention with a temperature by position."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from .._internal.types import frozen
from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, Chunked
from ..norms import RMSNorm
from ..rules import Rules
from ..scores import Score
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, has_rotary
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(5120, 48, 40, kv_heads=8, head_dim=128, positions=131_072, theta=500_000.0),
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_bias": False,
}


@frozen
class Temperature(Score):
    """`logit * (1 + attn_scale * log(1 + floor((q + first) / floor_scale)))`, q the query's place.

    Args:
      floor_scale: how many places have the same factor.
      attn_scale: of the logarithm.
      first: the number of the first place, 1 in Llama 4 and 0 in Ministral 3.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, as Llama 4 uses it.

    >>> score = Temperature(floor_scale=2, attn_scale=1.0)
    >>> float(score(jnp.asarray(3.0), 0, 0, jnp.asarray(0), 0))
    3.0
    """

    floor_scale: float
    attn_scale: float
    first: int = 1

    AXES: ClassVar = {}
    reads = "query position"

    def __call__(self, logits, b, n, q, k):
        steps = jnp.floor((jnp.asarray(q).astype(logits.dtype) + self.first) / self.floor_scale)
        return logits * (1 + self.attn_scale * jnp.log1p(steps))


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Llama4ForCausalLM."""
    rotates = has_rotary(config, index)
    parts: dict[str, Any] = {}
    if rotates:
        parts["rotary"] = rotary(config, layout="interleaved")
    if rotates and config.flag("use_qk_norm"):
        norm = RMSNorm(None, eps=config.number("rms_norm_eps"))
        parts |= {"q_norm": norm, "k_norm": norm, "norm_after_rotary": True}
    if config.flag("attn_temperature_tuning") and not rotates:
        score = Temperature(config.number("floor_scale"), config["attn_scale"])
        parts["rules"] = Rules(score=score)
    default = "chunked_attention" if rotates else "full_attention"
    kind = config.layer_type(index, lambda index: default, "chunked_attention")
    chunked = kind == "chunked_attention"
    parts["mask"] = CAUSAL & Chunked(config.count("attention_chunk_size")) if chunked else CAUSAL
    return grouped_query(config, init, bias=config.flag("attention_bias"), **parts)


FAMILY = Family(DEFAULTS, attention)
