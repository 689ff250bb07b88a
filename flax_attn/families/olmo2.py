"""OLMo 2: queries and keys normalized over all heads before rotation."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import Cast, RMSNorm
from ..positions import Rotary
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Olmo2ForCausalLM."""
    return normed(config, init, rotary(config))


def normed(config: Config, init: Mapping[str, Any], rope: Rotary | None) -> GroupedQueryAttention:
    """The layer with this rotary."""
    parts = {"rotary": rope, **norms(config, init)}
    return grouped_query(config, init, bias=config.flag("attention_bias"), **parts)


def norms(config: Config, init: Mapping[str, Any], cast: Cast = "after") -> dict[str, Any]:
    """Of queries and keys, over all heads together; `cast` as of the norm."""
    n, k, h = config.heads()
    eps, dtype = config.number("rms_norm_eps"), init["param_dtype"]
    return {
        name: RMSNorm(heads * h, eps=eps, over_heads=True, cast=cast, param_dtype=dtype)
        for name, heads in (("q_norm", n), ("k_norm", k))
    }


FAMILY = Family(DEFAULTS, attention)
