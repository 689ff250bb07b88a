"""Qwen2 and Qwen2.5: biases on query, key and value; a window in the upper layers if asked."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query, mask_of, upper_window
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,  # no field of the class, which uses one all the same
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen2ForCausalLM."""
    mask = mask_of(config, upper_window(config, index))
    return grouped_query(config, house, qkv_bias=True, rotary=rotary(config), mask=mask)


FAMILY = Family(DEFAULTS, attention)
