"""Cohere's Command R: neighbouring components are rotated; LayerNorm by head if configured."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import LayerNorm
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(8192, 40, 64, positions=8192, theta=500_000.0),
    "layer_norm_eps": 1e-5,
    "use_qk_norm": False,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of CohereForCausalLM."""
    n, k, h = config.heads()
    sizes = {"q_norm": (n, h), "k_norm": (k, h)} if config.flag("use_qk_norm") else {}
    norms: dict[str, Any] = {
        name: LayerNorm(size, eps=config.number("layer_norm_eps"), param_dtype=init["param_dtype"])
        for name, size in sizes.items()
    }
    rope, bias = rotary(config, layout="interleaved"), config.flag("attention_bias")
    return grouped_query(config, init, bias=bias, rotary=rope, **norms)


FAMILY = Family(DEFAULTS, attention)
