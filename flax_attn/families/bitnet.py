"""BitNet b1.58: Llama with a norm over all heads before the output projection.

Its published files have a quantization_config and plain weights of the attention.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import RMSNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 2560,
    "num_hidden_layers": 30,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "max_position_embeddings": 2048,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of BitNetForCausalLM."""
    norm = RMSNorm(
        config.count("hidden_size"),
        eps=config.number("rms_norm_eps"),
        over_heads=True,
        cast="before",
        param_dtype=init["param_dtype"],
    )
    parts = {"bias": config.flag("attention_bias"), "rotary": rotary(config), "o_norm": norm}
    return grouped_query(config, init, **parts)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the norm's name."""
    return (Rule("attn_sub_norm.weight -> o_norm.scale"),)


FAMILY = Family(DEFAULTS, attention, rules)
