"""Mamba 2, with a state space in every layer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import Config, Family
from ._state_space import RULES, mamba2

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_limit": (0.0, float("inf")),
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
}
NAMES = {
    "mamba_n_heads": ("num_heads",),
    "mamba_d_head": ("head_dim",),
    "mamba_n_groups": ("n_groups",),
    "mamba_d_state": ("state_size",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_expand": ("expand",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`mixer` of a layer of Mamba2ForCausalLM."""
    return mamba2(config, init, "layer_norm_epsilon")


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Rules for what names and module types do not determine."""
    return RULES


FAMILY = Family(DEFAULTS, attention, rules, names=NAMES)
