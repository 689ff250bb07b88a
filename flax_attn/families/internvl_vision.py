"""InternVL's image encoder: optional norms of queries and keys over all heads."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import RMSNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._encoder import multi_head

DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_qk_norm": False,
}
EPS = 1e-6  # which the class has and no field says


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of InternVLVisionModel as far as its dropout of the output."""
    parts: dict[str, Any] = {"qkv_bias": config.flag("attention_bias"), "out_bias": True}
    if config.flag("use_qk_norm"):
        layer_kwargs = {"eps": EPS, "cast": "before", "over_heads": True}
        for name in ("q_norm", "k_norm"):
            parts[name] = RMSNorm(
                config.count("hidden_size"), param_dtype=init["param_dtype"], **layer_kwargs
            )
    return multi_head(config, init, **parts)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name."""
    return (Rule("projection_layer -> o_proj"),)


FAMILY = Family(DEFAULTS, attention, rules)
