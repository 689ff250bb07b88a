"""Qwen2 and Qwen2.5: biases on query, key and value; a window in the upper layers if configured."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, mask_of, window_from_layer
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=32, positions=32_768, theta=10_000.0),
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen2ForCausalLM."""
    mask = mask_of(config, window_from_layer(config, index))
    return grouped_query(config, init, qkv_bias=True, rotary=rotary(config), mask=mask)


FAMILY = Family(DEFAULTS, attention)
