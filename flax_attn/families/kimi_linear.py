"""Kimi Linear: Kimi's delta rule in most layers, latent attention without a rotary in others."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._internal.checks import check_choice
from ..layers import KimiDeltaAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._fused import convolutions
from ._latent import latent

DEFAULTS = {
    "hidden_size": 2304,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "layer_types": None,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
    "linear_attn_config": None,
}
# What published files say of the delta rule in a dict of its own, and what the class calls it.
INSIDE = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` of a layer of KimiLinearForCausalLM."""
    if _is_kimi_delta(config, index):
        return _delta(config, init)
    return latent(config, init, None)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """The delta rule's decay is a module of its own."""
    if not _is_kimi_delta(config, index):
        return ()
    return (
        Rule("forget_gate.A_log -> A_log", "1 1 n 1 -> n"),
        Rule("forget_gate.* -> *"),
        Rule("o_norm.weight -> o_norm.scale"),
    )


def saved_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """In files the decay has no module of its own, and the convolutions are three."""
    if not _is_kimi_delta(config, index):
        return ()
    wide = _delta_config(config)
    each = wide.count("linear_num_heads") * wide.count("linear_head_dim")
    return (
        *convolutions(each, each, each),
        Rule("A_log -> A_log", "1 1 n 1 -> n"),
    )


def _delta_config(config: Config) -> Config:
    """The config with the sizes that stand in the dict of the delta rule."""
    inside = config["linear_attn_config"] or {}
    return config.replaced(**{name: inside[key] for key, name in INSIDE.items() if key in inside})


def _delta(config: Config, init: Mapping[str, Any]) -> KimiDeltaAttention:
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    config = _delta_config(config)
    width = config.count("linear_head_dim")
    return KimiDeltaAttention(
        config.count("hidden_size"),
        config.count("linear_num_heads"),
        width,
        width,
        conv_size=config.count("linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
        **init,
    )


def _is_kimi_delta(config: Config, index: int) -> bool:
    inside = config["linear_attn_config"] or {}

    def default(index: int) -> str:
        if "kda_layers" not in inside or "full_attn_layers" not in inside:
            return "full_attention" if index and index % 4 == 0 else "linear_attention"
        if index + 1 in inside["kda_layers"]:  # which count from 1
            return "linear_attention"
        if index + 1 in inside["full_attn_layers"]:
            return "full_attention"
        raise ValueError(
            f"kda_layers and full_attn_layers of linear_attn_config lack layer {index + 1} of "
            f"{config.count('num_hidden_layers')}, counted from 1."
        )

    return config.layer_type(index, default, "linear_attention") == "linear_attention"


FAMILY = Family(DEFAULTS, attention, rules)
