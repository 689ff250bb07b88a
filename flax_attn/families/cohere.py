"""Cohere's Command R: neighbouring components are turned; a LayerNorm for each head if asked."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import LayerNorm
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "head_dim": None,  # no field of the class, which uses one all the same
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "layer_norm_eps": 1e-5,
    "use_qk_norm": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of CohereForCausalLM."""
    n, k, h = config.heads()
    sizes = {"q_norm": (n, h), "k_norm": (k, h)} if config.flag("use_qk_norm") else {}
    norms: dict[str, Any] = {
        name: LayerNorm(size, eps=config.number("layer_norm_eps"), param_dtype=house["param_dtype"])
        for name, size in sizes.items()
    }
    turn, bias = rotary(config, layout="interleaved"), config.flag("attention_bias")
    return grouped_query(config, house, bias=bias, rotary=turn, **norms)


FAMILY = Family(DEFAULTS, attention)
