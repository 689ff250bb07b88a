"""NanoChat: pairs are rotated in reverse, then heads are normalized without a gain."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import RMSNorm
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(768, 12, 6, positions=2048, theta=10_000.0),
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of NanoChatForCausalLM."""
    norm, bias = RMSNorm(None, eps=config.number("rms_norm_eps")), config.flag("attention_bias")
    parts = {"q_norm": norm, "k_norm": norm, "norm_after_rotary": True}
    rope = replace(rotary(config), reverse=True)
    return grouped_query(config, init, bias=bias, rotary=rope, **parts)


FAMILY = Family(DEFAULTS, attention)
