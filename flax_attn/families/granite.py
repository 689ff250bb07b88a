"""Granite: Llama with its own scale, 1 unless configured otherwise."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..positions import Rotary
from ..rules import Rules
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "attention_multiplier": 1.0,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of GraniteForCausalLM."""
    return scaled(config, init, rotary(config))


def scaled(config: Config, init: Mapping[str, Any], rope: Rotary | None) -> GroupedQueryAttention:
    """The layer with this rotary."""
    if config["attention_multiplier"] is None:  # as in HyperCLOVA X
        config = config.replaced(attention_multiplier=config.query_heads()[1] ** -0.5)
    scale = config.number("attention_multiplier")
    bias = config.flag("attention_bias")
    return grouped_query(config, init, bias=bias, rotary=rope, rules=Rules(scale=scale))


FAMILY = Family(DEFAULTS, attention)
