"""GLM-4: neighbouring components of half a head are rotated; the output has no bias."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 40, 32, kv_heads=2, head_dim=128, positions=131_072, theta=10_000.0),
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Glm4ForCausalLM."""
    rope, bias = rotary(config, layout="interleaved", partial=True), config.flag("attention_bias")
    return grouped_query(config, init, qkv_bias=bias, rotary=rope)


FAMILY = Family(DEFAULTS, attention)
