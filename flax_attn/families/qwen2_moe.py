"""Qwen1.5-MoE and Qwen2-MoE: Qwen2, whose window is in the lower layers, every second of them."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query, mask_of, window_if_used
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,  # no field of the class, which uses one all the same
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "qkv_bias": True,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen2MoeForCausalLM."""

    def chosen(index: int) -> bool:
        return index % 2 == 0 and index < config["max_window_layers"]

    mask, bias = mask_of(config, window_if_used(config, index, chosen)), config.flag("qkv_bias")
    return grouped_query(config, house, qkv_bias=bias, rotary=rotary(config), mask=mask)


FAMILY = Family(DEFAULTS, attention)
