"""GLM-4.5: half of each head is rotated, RMSNorm by head if configured, no output bias.

GLM-4.5V's text is the same without norms, and its tokens have three positions.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(4096, 46, 96, kv_heads=8, positions=131_072, theta=10_000.0),
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": False,
    "attention_bias": False,
}
VISION_DEFAULTS = {
    **decoder_fields(4096, 46, 96, kv_heads=8, positions=65_536, theta=10_000.0),
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Glm4MoeForCausalLM."""
    parts = norms(config, init) if config.flag("use_qk_norm") else {}
    rope, bias = rotary(config, partial=True), config.flag("attention_bias")
    return grouped_query(config, init, qkv_bias=bias, rotary=rope, **parts)


def in_three_positions(
    config: Config, index: int, init: Mapping[str, Any]
) -> GroupedQueryAttention:
    """`self_attn` of Glm4vMoeTextModel."""
    rope = rotary(config, partial=True, sections=(8, 12, 12))
    return grouped_query(config, init, qkv_bias=config.flag("attention_bias"), rotary=rope)


FAMILY = Family(DEFAULTS, attention)
VISION = Family(VISION_DEFAULTS, in_three_positions)
