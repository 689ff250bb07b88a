"""Nemotron-H: each layer is Mamba 2, attention without positions, or no token mixer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import RENAMED, Config, Family
from ._decoder import grouped_query
from ._state_space import RULES, mamba2

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": None,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_dropout": 0.0,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_min": 0.001,
    "layer_norm_epsilon": 1e-5,
}
NAMES = {
    "layer_types": ("layers_block_type", "layer_types"),
    "mamba_n_heads": ("mamba_num_heads",),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_n_groups": ("n_groups", "mamba_n_groups"),
    "mamba_d_state": ("ssm_state_size",),
    "mamba_d_conv": ("conv_kernel", "mamba_d_conv"),
    "mamba_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "mamba_proj_bias": ("use_bias",),
    "hidden_act": ("mamba_hidden_act",),
    "time_step_min": ("time_step_min", "mamba_dt_min"),
}
LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
KINDS = (*LETTERS.values(),)


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`mixer` of a layer of NemotronHForCausalLM that is a state space or attention."""
    kind = config["layer_types"][index]
    if kind == "full_attention":
        return grouped_query(config, init, bias=False)
    least, width = config["time_step_min"], config.count("mamba_n_heads") * _head(config)
    limits = (least, float("inf")) if least > 0 else None
    return mamba2(config, init, "layer_norm_epsilon", width=width, step_limits=limits)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Weight rules of the state space layer."""
    return RULES if config["layer_types"][index] == "linear_attention" else ()


def missing_reason(config: Config, index: int) -> str:
    """Which layers mix no tokens: those of experts and of an MLP."""
    kind = config["layer_types"][index]
    return "" if kind in ("full_attention", "linear_attention") else f"{kind!r} alone"


def derived(config: Config) -> Config:
    """The config with the kinds of its layers, which say how many there are."""
    kinds, pattern = config["layer_types"], config["hybrid_override_pattern"]
    if kinds is None:
        kinds = KINDS_BY_DEFAULT if pattern is None else _spelt(pattern)
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layers_block_type must list kinds of layers; got {kinds!r}.")
    kinds = [RENAMED.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(
                f"layers_block_type may have {', '.join(KINDS)}; got {kind!r} among {len(kinds)}."
            )
    return config.replaced(layer_types=kinds, num_hidden_layers=len(kinds))


KINDS_BY_DEFAULT = ("linear_attention", "moe", "full_attention", "mlp")


def _spelt(pattern: Any) -> list[str]:
    if not isinstance(pattern, str) or not {*pattern} <= {*LETTERS}:
        raise ValueError(
            f"hybrid_override_pattern must be made of {', '.join(LETTERS)}; got {pattern!r}."
        )
    return [LETTERS[letter] for letter in pattern]


def _head(config: Config) -> int:
    return config.count("mamba_d_head")


FAMILY = Family(
    DEFAULTS, attention, rules, names=NAMES, derived=derived, missing_reason=missing_reason
)
