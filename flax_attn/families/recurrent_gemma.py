"""RecurrentGemma: Griffin's recurrence in two layers of three, a window in the third."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._internal.checks import check_choice, check_divides
from ..layers import RGLRU
from ..positions import Frequencies
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2560, 26, 10, positions=8192, theta=10_000.0),
    "partial_rotary_factor": 0.5,
    "attention_window_size": 2048,
    "block_types": ("recurrent", "recurrent", "attention"),
    "lru_width": None,
    "conv1d_width": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
}
NAMES = {"sliding_window": ("attention_window_size", "sliding_window")}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`temporal_block` of a layer of RecurrentGemmaForCausalLM."""
    if _is_recurrent(config, index):
        return _griffin(config, init)
    bias, rope = config.flag("attention_bias"), rotary(config, partial=True)
    if rope.scaling is not None and not isinstance(rope.scaling, Frequencies):
        raise ValueError("rope_type must be 'default' in this model_type, as in transformers.")
    parts = {"rotary": rope, "mask": causal_window(config)}
    return grouped_query(config, init, qkv_bias=bias, out_bias=True, **parts)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the names inside the recurrence, which is a module in torch."""
    return (Rule("rg_lru.* -> *"),) if _is_recurrent(config, index) else ()


def _griffin(config: Config, init: Mapping[str, Any]) -> RGLRU:
    check_choice("hidden_activation", config["hidden_activation"], "gelu_pytorch_tanh")
    width, n = config.count("hidden_size"), config.count("num_attention_heads")
    inner = width if config["lru_width"] is None else config.count("lru_width")
    check_divides("num_attention_heads", n, "lru_width", inner)
    return RGLRU(width, n, width=inner, conv_size=config.count("conv1d_width"), **init)


def _is_recurrent(config: Config, index: int) -> bool:
    """By block_types, which are repeated from the first layer on."""
    kinds = config["block_types"]
    if not isinstance(kinds, list | tuple) or not kinds:
        raise ValueError(f"block_types must list kinds of layers; got {kinds!r}.")
    kind = kinds[index % len(kinds)]
    check_choice(f"block_types[{index % len(kinds)}]", kind, "recurrent", "attention")
    return kind == "recurrent"


FAMILY = Family(DEFAULTS, attention, rules, names=NAMES)
