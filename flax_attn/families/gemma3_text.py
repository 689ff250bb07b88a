"""Gemma 3: five layers with a window and a rotary of their own to each that sees everything."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, FULL, Mask, Window
from ..norms import RMSNorm
from ..positions import Rotary
from ..rules import Rules
from ._config import Config, Family
from ._decoder import causal_window, grouped_query
from ._rope import parameters, rotary_of

DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "use_bidirectional_attention": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
KINDS = ("full_attention", "sliding_attention")


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Gemma3ForCausalLM."""

    def default(index: int) -> str:
        return KINDS[(index + 1) % config.count("sliding_window_pattern") != 0]

    kind = config.layer_type(index, default, "sliding_attention")
    if config.given("sliding_window_pattern") is not None and kind != default(index):
        raise ValueError(
            f"layer_types and sliding_window_pattern={config['sliding_window_pattern']} differ on "
            f"layer {index}; leave one of them out."
        )
    h, eps, dtype = config.heads()[2], config.number("rms_norm_eps"), house["param_dtype"]
    norms: dict[str, Any] = {
        name: RMSNorm(h, eps=eps, plus_one=True, param_dtype=dtype) for name in ("q_norm", "k_norm")
    }
    rules = Rules(scale=config.number("query_pre_attn_scalar") ** -0.5)
    parts = {"rotary": rotary(config, kind), "mask": mask(config, kind), "rules": rules, **norms}
    return grouped_query(config, house, bias=config.flag("attention_bias"), **parts)


def mask(config: Config, kind: str) -> Mask:
    """Causal, or with use_bidirectional_attention half of the window on each side."""
    if config.flag("use_bidirectional_attention"):
        half = config.count("sliding_window") // 2
        return Window(half, half) if kind == "sliding_attention" else FULL
    return causal_window(config) if kind == "sliding_attention" else CAUSAL


def rotary(config: Config, kind: str) -> Rotary:
    """Of a layer of this kind; in older files rope_scaling is of the layers that see everything."""
    new, full = config.given("rope_parameters"), kind == "full_attention"
    if new is not None and not {*new} <= {*KINDS}:
        raise ValueError(
            f"rope_parameters of a gemma3_text have a dict for each of {', '.join(KINDS)}; got "
            f"{', '.join(new)}."
        )
    new, old = (new or {}).get(kind), config.given("rope_scaling") if full else None
    if old and "type" in old and "rope_type" not in old:
        raise ValueError(
            f"rope_scaling says type={old['type']!r}, which transformers ignores in Gemma 3; call "
            "it rope_type."
        )
    rope = parameters(config, new, old, "rope_theta" if full else "rope_local_base_freq")
    if rope.get("truncate") is False:
        raise ValueError("truncate=False is not served: transformers ignores it in Gemma 3.")
    return rotary_of(config, rope)


FAMILY = Family(DEFAULTS, attention)
