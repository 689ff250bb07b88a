"""gpt-oss: a trained sink for each query head, YaRN, and a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import alternating, decoder_fields, grouped_query, mask_of
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2880, 36, 64, kv_heads=8, head_dim=64, positions=131_072, theta=150_000.0),
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "layer_types": None,
    "attention_bias": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of GptOssForCausalLM."""
    mask = mask_of(config, config.layer_type(index, alternating, "sliding_attention"))
    bias = config.flag("attention_bias")
    return grouped_query(config, init, bias=bias, rotary=rotary(config), mask=mask, sinks=True)


FAMILY = Family(DEFAULTS, attention)
