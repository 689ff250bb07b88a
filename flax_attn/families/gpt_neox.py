"""GPT-NeoX and Pythia: query, key and value head by head in one weight, and part of a head rotated.

A width of the rotary that is odd is rounded up, as transformers does.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "max_position_embeddings": 2048,
    "rotary_emb_base": 10_000.0,
    "rotary_pct": 0.25,
    "attention_bias": True,
    "attention_dropout": 0.0,
}
NAMES = {"rope_theta": ("rotary_emb_base",), "partial_rotary_factor": ("rotary_pct",)}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of GPTNeoXForCausalLM."""
    n, h = config.query_heads()
    rope, bias = rotary(config, partial=True), config.flag("attention_bias")
    return grouped_query(config, init, heads=(n, n, h), bias=bias, rotary=rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`query_key_value` holds of each head its query, key and value."""
    n, bias = config.query_heads()[0], config.flag("attention_bias")
    parts = fused("query_key_value", "(h n d) i -> n i (h d)", bias=bias, h=n)
    return (*parts, Rule("dense -> o_proj"))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
