"""SigLIP: image and text encoders, which have the same attention."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._encoder import multi_head

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of SiglipVisionModel and SiglipTextModel."""
    return multi_head(config, init, qkv_bias=True, out_bias=True)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name."""
    return (Rule("out_proj -> o_proj"),)


FAMILY = Family(DEFAULTS, attention, rules)
