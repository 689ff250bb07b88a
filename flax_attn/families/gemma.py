"""Gemma: Llama with heads of a width of their own."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import check_one_direction, grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "use_bidirectional_attention": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of GemmaForCausalLM."""
    check_one_direction(config)
    return grouped_query(config, house, bias=config.flag("attention_bias"), rotary=rotary(config))


FAMILY = Family(DEFAULTS, attention)
