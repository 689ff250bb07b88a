"""Llama: grouped queries with rotary positions in every scaling, and biases on all or none."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._gguf import names, unpermuted
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "attention_bias": False,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of LlamaForCausalLM."""
    return grouped_query(config, house, bias=config.flag("attention_bias"), rotary=rotary(config))


def gguf(config: Config, index: int) -> tuple[Rule, ...]:
    """llama.cpp turns neighbouring components, so its rows of query and key lie in pairs."""
    n, k, _ = config.heads()
    bias = config.flag("attention_bias")
    return (*unpermuted("q", n, bias), *unpermuted("k", k, bias), *names("v", "output"))


FAMILY = Family(DEFAULTS, attention, gguf=gguf)
