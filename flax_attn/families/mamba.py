"""Mamba, with a selective state space, decaying per component, in every layer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import Config, Family
from ._state_space import SELECTIVE_RULES, mamba

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "intermediate_size": None,
    "expand": 2,
    "state_size": 16,
    "time_step_rank": "auto",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "hidden_act": "silu",
}
NAMES = {
    "mamba_expand": ("expand",),
    "mamba_d_state": ("state_size",),
    "mamba_dt_rank": ("time_step_rank",),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_conv_bias": ("use_conv_bias",),
    "mamba_proj_bias": ("use_bias",),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`mixer` of a layer of MambaForCausalLM."""
    return mamba(config, init, None, width=config["intermediate_size"])


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Rules for what names and module types do not determine."""
    return SELECTIVE_RULES


FAMILY = Family(DEFAULTS, attention, rules, names=NAMES)
