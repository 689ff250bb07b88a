"""Mistral: grouped queries with rotary positions, and in every layer a window where one is set."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=131_072, theta=10_000.0),
    "sliding_window": 4096,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of MistralForCausalLM."""
    mask = CAUSAL if config["sliding_window"] is None else causal_window(config)
    return grouped_query(config, house, rotary=rotary(config), mask=mask)


FAMILY = Family(DEFAULTS, attention)
