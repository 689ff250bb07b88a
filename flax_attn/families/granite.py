"""Granite: Llama with a scale of its own, which is 1 unless the config says another."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,  # no field of the class, which uses one all the same
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "attention_multiplier": 1.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of GraniteForCausalLM."""
    how, bias = Rules(scale=config.number("attention_multiplier")), config.flag("attention_bias")
    return grouped_query(config, house, bias=bias, rotary=rotary(config), rules=how)


FAMILY = Family(DEFAULTS, attention)
