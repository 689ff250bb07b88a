"""Qwen3: queries and keys normalized head by head before rotation."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import RMSNorm
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, mask_of, window_from_layer
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=32, head_dim=128, positions=32_768, theta=10_000.0),
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Qwen3ForCausalLM."""
    mask, bias = mask_of(config, window_from_layer(config, index)), config.flag("attention_bias")
    parts = {"rotary": rotary(config), "mask": mask, **norms(config, init)}
    return grouped_query(config, init, bias=bias, **parts)


def norms(config: Config, init: Mapping[str, Any]) -> dict[str, Any]:
    """Norms of queries and keys, head by head."""
    h, eps, dtype = config.heads()[2], config.number("rms_norm_eps"), init["param_dtype"]
    return {
        name: RMSNorm(h, eps=eps, cast="before", param_dtype=dtype) for name in ("q_norm", "k_norm")
    }


FAMILY = Family(DEFAULTS, attention)
