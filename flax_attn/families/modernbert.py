"""ModernBERT: two of three layers have a bidirectional window and another rotary.

Its decoder is causal, and has separate projections.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, FULL, Mask, Window
from ..positions import Rotary
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import causal_window, check_causal
from ._encoder import multi_head
from ._fused import fused
from ._rope import KINDS, parameters, rotary_of

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "layer_types": None,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "rope_parameters": None,
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of ModernBertModel."""
    kind, half = kind_of(config, index), config.count("local_attention") // 2
    return layer(config, kind, init, Window(half, half) if kind == KINDS[1] else FULL)


def decoder(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of ModernBertDecoderModel, whose window is half as long: the token itself is in it.

    Files that transformers has written name that half too, as sliding_window, which then counts.
    """
    check_causal(config)
    kind, mask = kind_of(config, index), CAUSAL
    if kind == KINDS[1] and config["sliding_window"] is not None:
        mask = causal_window(config)
    elif kind == KINDS[1]:
        mask = CAUSAL & Window(config.count("local_attention") // 2 - 1, 0)
    return layer(config, kind, init, mask)


def layer(config: Config, kind: str, init: Mapping[str, Any], mask: Mask) -> GroupedQueryAttention:
    """The layer of a kind, with this mask."""
    bias = config.flag("attention_bias")
    parts = {
        "qkv_bias": bias,
        "out_bias": bias,
        "rotary": rotary_of_layers(config, kind),
        "mask": mask,
    }
    return multi_head(config, init, **parts)


def kind_of(config: Config, index: int) -> str:
    """Which of the two kinds a layer is, by layer_types or global_attn_every_n_layers."""

    def default(index: int) -> str:
        return KINDS[index % config.count("global_attn_every_n_layers") != 0]

    return config.layer_type(index, default, KINDS[1])


def rotary_of_layers(config: Config, kind: str) -> Rotary:
    """The rotary of a kind; a rope_scaling of older files is of both.

    Raises:
      ValueError: unless rope_parameters are by kind.
    """
    new = config.entry("rope_parameters")
    if new is not None and not {*new} <= {*KINDS}:
        raise ValueError(
            f"rope_parameters of a {config.entry('model_type')} have a dict for each of "
            f"{', '.join(KINDS)}; got {', '.join(new)}."
        )
    theta = "global_rope_theta" if kind == KINDS[0] else "local_rope_theta"
    rope = parameters(config, (new or {}).get(kind), config.entry("rope_scaling"), theta)
    return rotary_of(config, rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`Wqkv` holds the rows of all queries, then those of the keys, then those of the values."""
    parts = fused("Wqkv", "(n o) i -> n i o", bias=config.flag("attention_bias"))
    return (*parts, Rule("Wo -> o_proj"))


def rules_of_decoder(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name."""
    return (Rule("Wo -> o_proj"),)


FAMILY = Family(DEFAULTS, attention, rules)
DECODER = Family({**DEFAULTS, "sliding_window": None}, decoder, rules_of_decoder)
