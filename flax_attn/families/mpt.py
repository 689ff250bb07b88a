"""MPT: ALiBi by key position; query, key and value in one weight, clamped if configured.

Its class reads three fields of `attn_config`; ALiBi is always applied, whatever `alibi` says.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ..weights.rule import Rule
from ._alibi import KeyAlibi
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused

WITHIN = {"attn_pdrop": 0.0, "clip_qkv": None, "softmax_scale": None}
DEFAULTS = {"d_model": 2048, "n_layers": 24, "n_heads": 16, "attn_config": None}
NAMES = {
    "hidden_size": ("d_model", "hidden_size"),
    "num_hidden_layers": ("n_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_heads", "num_attention_heads"),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of MptForCausalLM."""
    within = config["attn_config"] or {}
    config = config.replaced(**{name: within.get(name, x) for name, x in WITHIN.items()})
    config = config.replaced(attention_dropout=config["attn_pdrop"])
    n, h = config.query_heads()
    scale = None if config["softmax_scale"] is None else config.number("softmax_scale")
    score_rules = Rules(score=KeyAlibi(n), scale=scale)
    clip = config.number("clip_qkv") if config["clip_qkv"] else None
    return grouped_query(
        config, init, heads=(n, n, h), bias=False, rules=score_rules, clip_qkv=clip
    )


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`Wqkv` holds all queries, then all keys and all values."""
    return (*fused("Wqkv", "(n o) i -> n i o", bias=False), Rule("out_proj -> o_proj"))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
