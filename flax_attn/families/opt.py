"""OPT: multi-head attention without positions, which embeddings add; biases on all or none."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "enable_bias": True,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of OPTForCausalLM."""
    n, h = config.query_heads()
    return grouped_query(config, init, heads=(n, n, h), bias=config.flag("enable_bias"))


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name."""
    return (Rule("out_proj -> o_proj"),)


FAMILY = Family(DEFAULTS, attention, rules)
