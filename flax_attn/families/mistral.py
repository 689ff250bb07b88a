"""Mistral: grouped queries with rotary positions, and in every layer a window where one is set."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query, mask_of
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=131_072, theta=10_000.0),
    "sliding_window": 4096,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of MistralForCausalLM."""
    return windowed(config, init, bias=False, rotary=rotary(config))


def biased(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """Mistral with biases on all four projections or none."""
    bias = config.flag("attention_bias")
    return windowed(config, init, bias=bias, rotary=rotary(config))


def by_kind(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of MinistralForCausalLM, whose layers may have the window or not."""

    def default(index: int) -> str:
        return "full_attention" if config["sliding_window"] is None else "sliding_attention"

    return _of_kind(config, init, config.layer_type(index, default, "sliding_attention"))


def one_in_four(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of CwmForCausalLM, where every fourth layer has full attention."""

    def default(index: int) -> str:
        return "sliding_attention" if index % 4 else "full_attention"

    return _of_kind(config, init, config.layer_type(index, default, "sliding_attention"))


def _of_kind(config: Config, init: Mapping[str, Any], kind: str) -> GroupedQueryAttention:
    return grouped_query(config, init, rotary=rotary(config), mask=mask_of(config, kind))


def windowed(
    config: Config, init: Mapping[str, Any], *, bias: bool, **parts: Any
) -> GroupedQueryAttention:
    """A layer with the window, if the config has one; arguments as of `grouped_query`."""
    mask = CAUSAL if config["sliding_window"] is None else causal_window(config)
    return grouped_query(config, init, bias=bias, mask=mask, **parts)


FAMILY = Family(DEFAULTS, attention)
