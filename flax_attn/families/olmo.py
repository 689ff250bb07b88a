"""OLMo and OLMoE: Llama and OLMo 2 whose queries, keys and values may be clamped."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary
from .olmo2 import norms

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "attention_bias": False,
    "clip_qkv": None,
}
# There the norms are as wide as a token, so that heads have no width of their own.
NORMED_DEFAULTS = {
    **{name: value for name, value in DEFAULTS.items() if name != "head_dim"},
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of OlmoForCausalLM."""
    return _clamped(config, init)


def normed(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of OlmoeForCausalLM."""
    return _clamped(config, init, **norms(config, init, "before"))


def _clamped(config: Config, init: Mapping[str, Any], **parts: Any) -> GroupedQueryAttention:
    clip, bias = config["clip_qkv"], config.flag("attention_bias")
    parts["clip_qkv"] = None if clip is None else config.number("clip_qkv")
    return grouped_query(config, init, bias=bias, rotary=rotary(config), **parts)


FAMILY = Family(DEFAULTS, attention)
NORMED = Family(NORMED_DEFAULTS, normed)
