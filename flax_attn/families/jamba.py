"""Jamba: Mamba in most layers, attention without positions in one layer per period."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, grouped_query
from ._state_space import SELECTIVE_RULES, mamba

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "attention_dropout": 0.0,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `mamba` of a layer of JambaForCausalLM."""
    if _is_attention(config, index):
        return grouped_query(config, init, bias=False)
    return mamba(config, init, "gains", config.number("rms_norm_eps"))


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Weight rules of the state space layer."""
    return () if _is_attention(config, index) else SELECTIVE_RULES


def _is_attention(config: Config, index: int) -> bool:
    period, offset = config.count("attn_layer_period"), config["attn_layer_offset"]
    if not 0 <= offset < period:
        raise ValueError(
            f"attn_layer_offset must be from 0 to attn_layer_period - 1 = {period - 1}; got "
            f"{offset!r}."
        )
    return index % period == offset


FAMILY = Family(DEFAULTS, attention, rules, path=by_kind(_is_attention, "self_attn", "mamba"))
