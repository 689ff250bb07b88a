"""Bloom: ALiBi by key position, no position embeddings; query, key and value in one weight."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ..weights.rule import Rule
from ._alibi import KeyAlibi
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused

DEFAULTS = {"hidden_size": 64, "n_layer": 2, "n_head": 8, "attention_dropout": 0.0}
NAMES = {
    "hidden_size": ("hidden_size", "n_embed"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attention` of BloomForCausalLM, without the residual that its class adds at its end.

    Nor does it have the dropout of the output before that sum, `hidden_dropout`.
    """
    n, h = config.query_heads()
    score_rules = Rules(score=KeyAlibi(n))
    return grouped_query(config, init, heads=(n, n, h), bias=True, rules=score_rules)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`query_key_value` stores query, key and value head by head."""
    n = config.query_heads()[0]
    parts = fused("query_key_value", "(h n d) i -> n i (h d)", bias=True, h=n)
    return (*parts, Rule("dense -> o_proj"))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
