"""GLM-4.1V's text: GLM-4 with biases on query, key and value, and three positions per token."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Glm4vTextModel."""
    rope = rotary(config, layout="interleaved", partial=True, sections=(8, 12, 12))
    return grouped_query(config, init, qkv_bias=True, rotary=rope)


FAMILY = Family(DEFAULTS, attention)
