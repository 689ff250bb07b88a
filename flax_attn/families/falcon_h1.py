"""Falcon-H1: in every layer grouped queries and Mamba 2 side by side, whose outputs are summed."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._parts import Parts, at
from ._rope import rotary
from ._state_space import FIELDS, RULES, head_width, mamba2

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=8192, theta=10_000.0),
    **FIELDS,
    "mamba_d_ssm": 1024,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "rms_norm_eps": 1e-5,
    "projectors_bias": False,
    "attention_bias": False,
    "key_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_multipliers": None,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` of a layer of FalconH1ForCausalLM.

    attention_in_multiplier and attention_out_multiplier stand outside, around it.
    """
    head_width(config, _inner_width(config))  # raises what no layer of the class is built with
    scale = config.heads()[2] ** -0.5 * config.number("key_multiplier")
    parts = {"rotary": rotary(config), "rules": Rules(scale=scale)}
    return grouped_query(config, init, bias=config.flag("attention_bias"), **parts)


def recurrent(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`mamba` of a layer of FalconH1ForCausalLM; ssm_out_multiplier stands outside, behind it."""
    inner, norm = config["ssm_multipliers"] or [1.0] * 5, None
    if not isinstance(inner, list) or len(inner) != 5:
        raise ValueError(
            f"ssm_multipliers must be five numbers, of z, x, B, C and dt; got {inner!r}."
        )
    if config.flag("mamba_rms_norm"):
        norm = "before" if config.flag("mamba_norm_before_gate") else "after"
    multipliers = (config["ssm_in_multiplier"], *inner)
    parts = {
        "norm": norm,
        "out_bias": config.flag("projectors_bias"),
        "multipliers": None if set(multipliers) == {1.0} else multipliers,
    }
    return mamba2(config, init, "rms_norm_eps", width=_inner_width(config), **parts)


def recurrent_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Rules of the norm, if there is one."""
    return RULES if config.flag("mamba_rms_norm") else ()


def _inner_width(config: Config) -> int | None:
    return None if config["mamba_d_ssm"] is None else config.count("mamba_d_ssm")


FAMILY: Parts = {
    "attention": Family(DEFAULTS, attention, path=at("layers.{}.self_attn")),
    "recurrent": Family(DEFAULTS, recurrent, recurrent_rules, path=at("layers.{}.mamba")),
}
