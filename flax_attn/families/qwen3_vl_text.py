"""Qwen3-VL's text: Qwen3 without windows, with three interleaved positions per token."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=32, head_dim=128, positions=128_000, theta=500_000.0),
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen3VLTextModel."""
    rope, bias = rotary(config, sections=(24, 20, 20), interleaved=True), "attention_bias"
    parts = norms(config, init)
    return grouped_query(config, init, bias=config.flag(bias), rotary=rope, **parts)


FAMILY = Family(DEFAULTS, attention)
