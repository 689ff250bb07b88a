"""SmolLM3: no rotary in every fourth layer, which may have a window instead."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, has_rotary, mask_of
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2048, 36, 16, kv_heads=4, positions=32_768, theta=2_000_000.0),
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of SmolLM3ForCausalLM."""

    def default(index: int) -> str:
        used = config.flag("use_sliding_window") and config["sliding_window"] is not None
        return "sliding_attention" if used and not rotates else "full_attention"

    rotates, bias = has_rotary(config, index), config.flag("attention_bias")
    mask = mask_of(config, config.layer_type(index, default, "sliding_attention"))
    rope = rotary(config) if rotates else None
    return grouped_query(config, init, bias=bias, rotary=rope, mask=mask)


FAMILY = Family(DEFAULTS, attention)
