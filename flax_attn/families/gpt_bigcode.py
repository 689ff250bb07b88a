"""GPT-BigCode (StarCoder): GPT-2 with multi-query attention unless configured otherwise."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ..weights.rule import Rule
from . import gpt2
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused

DEFAULTS = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "multi_query": True,
    "scale_attn_weights": True,
    "attn_pdrop": 0.1,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of GPTBigCodeForCausalLM, but for its dropout of the output, `resid_pdrop`."""
    n, h = config.query_heads()
    heads = (n, 1 if config.flag("multi_query") else n, h)
    scale_rules = Rules() if config.flag("scale_attn_weights") else Rules(scale=1.0)
    return grouped_query(config, init, heads=heads, bias=True, rules=scale_rules)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`c_attn` holds all queries, the key and the value; with a key for each head, head by head."""
    n, h = config.query_heads()
    if config.flag("multi_query"):
        parts = fused("c_attn", "(n o) i -> n i o", bias=True, o=(n * h, h, h))
    else:
        parts = fused("c_attn", "(h n d) i -> n i (h d)", bias=True, h=n)
    return (*parts, Rule("c_proj -> o_proj"))


FAMILY = Family(DEFAULTS, attention, rules, gpt2.NAMES)
