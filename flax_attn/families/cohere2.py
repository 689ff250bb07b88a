"""Cohere's Command A: a window and a rotary in three layers of four, neither in the others."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query, mask_of
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Cohere2ForCausalLM."""

    def default(index: int) -> str:
        last = (index + 1) % config.count("sliding_window_pattern") == 0
        return "full_attention" if last else "sliding_attention"

    kind = config.layer_type(index, default, "sliding_attention")
    rope, bias = rotary(config, layout="interleaved"), config.flag("attention_bias")
    parts = {"rotary": rope if kind == "sliding_attention" else None, "mask": mask_of(config, kind)}
    return grouped_query(config, init, bias=bias, **parts)


FAMILY = Family(DEFAULTS, attention)
