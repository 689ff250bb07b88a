"""Phi-1 and Phi-2: biases, part of each head rotated, LayerNorm over all heads if configured.

Persimmon has the same attention, with query, key and value head by head in one weight.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import LayerNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "qk_layernorm": False,
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}
PERSIMMON_DEFAULTS = {
    **{key: value for key, value in DEFAULTS.items() if key != "num_key_value_heads"},
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "max_position_embeddings": 16_384,
    "qk_layernorm": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of PhiForCausalLM."""
    return _biased(config, init, config.heads())


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the names of the norms and of the output projection."""
    named = (Rule(f"{x}_layernorm -> {x}_norm") for x in ("q", "k"))
    return (*(named if config.flag("qk_layernorm") else ()), Rule("dense -> o_proj"))


def with_keys_of_all(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of PersimmonForCausalLM."""
    n, h = config.query_heads()
    return _biased(config, init, (n, n, h))


def fused_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`query_key_value` holds of each head its query, key and value."""
    n = config.query_heads()[0]
    parts = fused("query_key_value", "(h n d) i -> n i (h d)", bias=True, h=n)
    return (*parts, *rules(config, index))


def _biased(
    config: Config, init: Mapping[str, Any], heads: tuple[int, int, int]
) -> GroupedQueryAttention:
    eps, dtype = config.number("layer_norm_eps"), init["param_dtype"]
    normed = ("q_norm", "k_norm") if config.flag("qk_layernorm") else ()
    norms: dict[str, Any] = {
        name: LayerNorm(heads[2], eps=eps, use_bias=True, param_dtype=dtype) for name in normed
    }
    rope = rotary(config, partial=True)
    return grouped_query(config, init, heads=heads, bias=True, rotary=rope, **norms)


FAMILY = Family(DEFAULTS, attention, rules)
PERSIMMON = Family(PERSIMMON_DEFAULTS, with_keys_of_all, fused_rules)
