"""OLMo 2: queries and keys normed over all heads together before the rotation."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import RMSNorm
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,  # no field of the class, which uses one all the same
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Olmo2ForCausalLM."""
    parts = {"rotary": rotary(config), **norms(config, house)}
    return grouped_query(config, house, bias=config.flag("attention_bias"), **parts)


def norms(config: Config, house: Mapping[str, Any]) -> dict[str, Any]:
    """Of queries and keys, over all heads together."""
    n, k, h = config.heads()
    eps, dtype = config.number("rms_norm_eps"), house["param_dtype"]
    return {
        name: RMSNorm(heads * h, eps=eps, over_heads=True, param_dtype=dtype)
        for name, heads in (("q_norm", n), ("k_norm", k))
    }


FAMILY = Family(DEFAULTS, attention)
