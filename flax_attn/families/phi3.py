"""Phi-3 and Phi-4-mini: one weight for query, key and value; LongRoPE, on part of a head."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(3072, 32, 32, positions=4096, theta=10_000.0),
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
}
RENAMED = {"su": "longrope", "yarn": "longrope"}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Phi3ForCausalLM."""
    mask = CAUSAL if config["sliding_window"] is None else causal_window(config)
    rope = rotary(config, partial=True, renamed=RENAMED)
    return grouped_query(config, init, rotary=rope, mask=mask)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`qkv_proj` holds the rows of all query heads, then those of the key and of the value."""
    n, k, h = config.heads()
    names = "qkv_proj.weight -> {q_proj,k_proj,v_proj}.kernel"
    return (Rule(names, "(n o) i -> n i o", o=(n * h, k * h, k * h)),)


FAMILY = Family(DEFAULTS, attention, rules)
