"""EXAONE 4: heads are normalized; if some layers have a window, the others have no rotary."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query, mask_of
from ._rope import rotary
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=32, positions=2048, theta=10_000.0),
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Exaone4ForCausalLM."""
    kind = config.layer_type(index, lambda i: _default(config, i), "sliding_attention")
    rotates = config["sliding_window"] is None or kind == "sliding_attention"
    rope = rotary(config)  # what is wrong in it is told of all layers
    parts = {"rotary": rope if rotates else None, **norms(config, init)}
    return grouped_query(config, init, bias=False, mask=mask_of(config, kind), **parts)


def _default(config: Config, index: int) -> str:
    """A window in all layers but every n-th, n the `sliding_window_pattern`."""
    if config["sliding_window"] is None:
        raise ValueError("sliding_window=None needs layer_types beside it, which the config lacks.")
    every = config.count("sliding_window_pattern")
    return "sliding_attention" if (index + 1) % every else "full_attention"


FAMILY = Family(DEFAULTS, attention)
