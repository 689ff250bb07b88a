"""Llama: grouped queries with rotary positions in every scaling, and biases on all or none."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of LlamaForCausalLM."""
    return grouped_query(config, house, bias=config.flag("attention_bias"), rotary=rotary(config))


FAMILY = Family(DEFAULTS, attention)
