"""Seed-OSS: Llama with a separate setting for the output bias."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 64, 80, kv_heads=8, head_dim=128, positions=524_288, theta=10_000.0),
    "attention_bias": True,
    "attention_out_bias": False,
    "attention_dropout": 0.1,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of SeedOssForCausalLM, but for its dropout of the output, `residual_dropout`."""
    parts: dict[str, Any] = {"qkv_bias": config.flag("attention_bias"), "rotary": rotary(config)}
    return grouped_query(config, init, out_bias=config.flag("attention_out_bias"), **parts)


FAMILY = Family(DEFAULTS, attention)
