"""Granite 4: Mamba 2 in most layers, Granite's attention in others, maybe without a rotary."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, decoder_fields
from ._rope import rotary
from ._state_space import FIELDS, RULES, head_width, is_recurrent, mamba2
from .granite import scaled

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    **FIELDS,
    "layer_types": None,
    "position_embedding_type": None,
    "rms_norm_eps": 1e-6,
    "attention_multiplier": 1.0,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `mamba` of a layer of GraniteMoeHybridForCausalLM."""
    if is_recurrent(config, index):
        return mamba2(config, init, "rms_norm_eps")
    head_width(config)  # raises what no layer of the class is built with
    rope = rotary(config) if config["position_embedding_type"] == "rope" else None
    return scaled(config, init, rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Weight rules of the state space layer."""
    return RULES if is_recurrent(config, index) else ()


NAMES = {"layer_types": ("layer_types", "layers_block_type")}
FAMILY = Family(DEFAULTS, attention, rules, names=NAMES, path=by_kind(is_recurrent, "mamba"))
