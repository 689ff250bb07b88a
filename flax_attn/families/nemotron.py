"""Nemotron: Llama with a rotary on part of a head."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(6144, 32, 48, positions=4096, theta=10_000.0),
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of NemotronForCausalLM."""
    rope, bias = rotary(config, partial=True), config.flag("attention_bias")
    return grouped_query(config, init, bias=bias, rotary=rope)


FAMILY = Family(DEFAULTS, attention)
