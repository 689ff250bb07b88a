"""OLMo 3: OLMo 2 with a window in three layers of four, whose rotary is never scaled."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, mask_of
from ._rope import rotary_of_kind
from .olmo2 import norms

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=500_000.0),
    "default_theta": 500_000.0,  # of layers with a window, which do not read rope_theta
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "layer_types": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Olmo3ForCausalLM."""

    def default(index: int) -> str:
        return "sliding_attention" if (index + 1) % 4 else "full_attention"

    kind, bias = (
        config.layer_type(index, default, "sliding_attention"),
        config.flag("attention_bias"),
    )
    parts = {"rotary": rotary_of_kind(config, kind, "default_theta"), **norms(config, init)}
    return grouped_query(config, init, bias=bias, mask=mask_of(config, kind), **parts)


FAMILY = Family(DEFAULTS, attention)
