"""Llama 3.2 Vision's text: Llama's attention, and cross attention to the image in some layers.

Those are `CrossAttention`s, called as `layer(x, memory)`, where the memory is the image's tokens.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import CrossAttention, GroupedQueryAttention
from ..norms import RMSNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5,
    "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
    "dropout": 0.0,
}
NAMES = {"attention_dropout": ("dropout",)}


def attention(
    config: Config, index: int, init: Mapping[str, Any]
) -> GroupedQueryAttention | CrossAttention:
    """`self_attn` or `cross_attn` of a layer of MllamaForCausalLM."""
    if not crosses(config, index):
        return grouped_query(config, init, bias=False, rotary=rotary(config))
    (n, k, h), eps = config.heads(), config.number("rms_norm_eps")
    norm = {"eps": eps, "cast": "before", "param_dtype": init["param_dtype"]}
    return CrossAttention(
        *(config.count("hidden_size"), n),
        num_kv_heads=k,
        norms=(RMSNorm(h, **norm), RMSNorm(h, **norm)),
        use_bias=False,
        dropout=config.rate("attention_dropout"),
        **init,
    )


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name in cross attention layers."""
    return (Rule("o_proj -> out_proj"),) if crosses(config, index) else ()


def crosses(config: Config, index: int) -> bool:
    """Whether a layer has cross attention."""
    return index in config["cross_attention_layers"]


FAMILY = Family(DEFAULTS, attention, rules, NAMES, path=by_kind(crosses, "cross_attn"))
