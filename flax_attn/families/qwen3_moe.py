"""Qwen3-MoE: Qwen3, with a window in all layers if it has one."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query
from ._rope import rotary
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(2048, 24, 32, kv_heads=4, positions=32_768, theta=10_000.0),
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen3MoeForCausalLM."""
    used = config.flag("use_sliding_window") and config["sliding_window"] is not None
    parts = {"mask": causal_window(config) if used else CAUSAL, **norms(config, init)}
    bias = config.flag("attention_bias")
    return grouped_query(config, init, bias=bias, rotary=rotary(config), **parts)


FAMILY = Family(DEFAULTS, attention)
