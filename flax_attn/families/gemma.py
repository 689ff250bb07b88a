"""Gemma: Llama with a head width independent of the hidden size."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import check_one_direction, decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(3072, 28, 16, kv_heads=16, head_dim=256, positions=8192, theta=10_000.0),
    "use_bidirectional_attention": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of GemmaForCausalLM."""
    check_one_direction(config)
    return grouped_query(config, init, bias=config.flag("attention_bias"), rotary=rotary(config))


FAMILY = Family(DEFAULTS, attention)
