"""Qwen2.5-VL's text: Qwen2, whose tokens have three positions, of time, row and column (M-RoPE).

`layer(x, positions=...)` takes them as `3 *B T`; without positions all three count the tokens.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query, mask_of, window_from_layer
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "layer_types": None,
    "attention_dropout": 0.0,
}
SECTIONS = (16, 24, 24)  # where rope_parameters have no mrope_section


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen2_5_VLTextModel."""
    rope = rotary(config, renamed={"mrope": "default"}, sections=SECTIONS)
    mask = mask_of(config, window_from_layer(config, index))
    return grouped_query(config, init, qkv_bias=True, rotary=rope, mask=mask)


FAMILY = Family(DEFAULTS, attention)
