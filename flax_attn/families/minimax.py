"""MiniMax: lightning attention in every second layer, Mistral's attention in the others."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._internal.checks import check_choice
from ..layers import LightningAttention
from ..weights.rule import Rule
from . import mistral
from ._config import Config, Family
from ._decoder import decoder_fields
from ._fused import fused

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=131_072, theta=1_000_000.0),
    "sliding_window": None,
    "layer_types": None,
    "hidden_act": "silu",
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` of a layer of MiniMaxForCausalLM."""
    if not _is_lightning(config, index):
        return mistral.attention(config, index, init)
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    (n, h), layers = config.query_heads(), config.count("num_hidden_layers")
    factor = 1 - index / (layers - 1 + 1e-5) + 1e-5  # later layers look back further
    return LightningAttention(config.count("hidden_size"), n, h, h, slope_factor=factor, **init)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Lightning attention fuses query, key and value head by head.

    Where a file holds its tables of decays too, which follow from the config, skip them by
    `Rule.skip`: `slope_rate`, `query_decay`, `key_decay`, `diagonal_decay`.
    """
    if not _is_lightning(config, index):
        return ()
    n, h = config.query_heads()
    return fused("qkv_proj", "(h n o) i -> n i (h o)", bias=False, h=n, o=h)


def _is_lightning(config: Config, index: int) -> bool:
    def default(index: int) -> str:
        return "linear_attention" if index % 2 else "full_attention"

    return config.layer_type(index, default, "linear_attention") == "linear_attention"


FAMILY = Family(DEFAULTS, attention, rules)
