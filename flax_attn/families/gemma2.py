"""Gemma 2: its own scale, soft-capped logits, and a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import Mask
from ..rules import Rules
from ..scores import IDENTITY, Softcap
from ._config import Config, Family
from ._decoder import alternating, check_one_direction, decoder_fields, grouped_query, mask_of
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2304, 26, 8, kv_heads=4, head_dim=256, positions=8192, theta=10_000.0),
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Gemma2ForCausalLM."""
    check_one_direction(config)
    kind = config.layer_type(index, alternating, "sliding_attention")
    return capped(config, init, mask_of(config, kind))


def capped(config: Config, init: Mapping[str, Any], mask: Mask) -> GroupedQueryAttention:
    """A layer with soft-capped logits and any mask."""
    has_cap = config["attn_logit_softcapping"] is not None
    score = Softcap(config.number("attn_logit_softcapping")) if has_cap else IDENTITY
    return grouped_query(
        config,
        init,
        bias=config.flag("attention_bias"),
        rotary=rotary(config),
        mask=mask,
        rules=Rules(score=score, scale=config.number("query_pre_attn_scalar") ** -0.5),
    )


FAMILY = Family(DEFAULTS, attention)
