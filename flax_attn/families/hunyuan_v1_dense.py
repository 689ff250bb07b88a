"""Hunyuan: Llama whose heads are normalized after rotation, and whose rotary may have an alpha."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..positions import Rotary
from ..weights.rule import Rule
from ._config import Config, Family, above_zero
from ._decoder import decoder_fields, grouped_query
from ._rope import rope_of, rotary_of
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of HunYuanDenseV1ForCausalLM."""
    parts = {"rotary": _with_alpha(config), "norm_after_rotary": True, **norms(config, init)}
    return grouped_query(config, init, bias=config.flag("attention_bias"), **parts)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the norms' names."""
    names = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
    return tuple(Rule(f"{torch_name}.weight -> {name}.scale") for torch_name, name in names.items())


def _with_alpha(config: Config) -> Rotary:
    """Replaces a dynamic rotary with alpha by a plain one with another base.

    Raises:
      ValueError: for an alpha of another kind, or without a head_dim, which its class needs.
    """
    rope = rope_of(config, ("alpha",))
    alpha = rope.pop("alpha", None)
    if not alpha:
        return rotary_of(config, rope)
    if rope["rope_type"] != "dynamic":
        raise ValueError(f"alpha={alpha!r} needs rope_type='dynamic'; got {rope['rope_type']!r}.")
    width = config.count("head_dim")
    base = above_zero("rope_theta", rope["rope_theta"])
    base *= above_zero("alpha", alpha) ** (width / (width - 2))
    return rotary_of(config, {"rope_type": "default", "rope_theta": base})


FAMILY = Family(DEFAULTS, attention, rules)
