"""Qwen1.5-MoE and Qwen2-MoE: Qwen2, whose window is in the lower layers, every second of them."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, mask_of, window_if_used
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2048, 24, 16, kv_heads=16, positions=32_768, theta=10_000.0),
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "qkv_bias": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen2MoeForCausalLM."""

    def chosen(index: int) -> bool:
        return index % 2 == 0 and index < config["max_window_layers"]

    mask, bias = mask_of(config, window_if_used(config, index, chosen)), config.flag("qkv_bias")
    return grouped_query(config, init, qkv_bias=bias, rotary=rotary(config), mask=mask)


FAMILY = Family(DEFAULTS, attention)
