"""Llama 3.2 Vision's text: Llama's attention in the layers that do not look at images."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
    "dropout": 0.0,
}
NAMES = {"attention_dropout": ("dropout",)}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of MllamaForCausalLM."""
    return grouped_query(config, house, bias=False, rotary=rotary(config))


def lacks(config: Config, index: int) -> str:
    """Which layers look at images, with fewer heads of keys than of queries."""
    crossing = config["cross_attention_layers"]
    told = f"cross attention over images (cross_attention_layers={[*crossing]})"
    return told if index in crossing else ""


FAMILY = Family(DEFAULTS, attention, names=NAMES, lacks=lacks)
