"""Longformer: a window for most tokens, global attention for tokens named in the call.

The layer is `attention.self`, called `layer(x, global_tokens=...)`: the projection of its output
stands in `attention.output`.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import LongformerAttention
from ._config import Config, Family
from ._parts import at

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "attention_probs_dropout_prob": 0.1,
    "attention_window": 512,
}
NAMES = {"attention_dropout": ("attention_probs_dropout_prob",)}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LongformerAttention:
    """`attention.self` of LongformerModel."""
    return LongformerAttention(
        config.count("hidden_size"),
        config.query_heads()[0],
        _window(config, index),
        dropout=config.rate("attention_dropout"),
        **init,
    )


def _window(config: Config, index: int) -> int:
    """How many tokens a layer sees beside its own: one number for all layers, or one for each."""
    windows, layers = config["attention_window"], config.count("num_hidden_layers")
    each = windows if isinstance(windows, list | tuple) else [windows] * layers
    whole = all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in each)
    if len(each) != layers or not whole or each[index] % 2:
        raise ValueError(
            "attention_window must be an even number above zero, or a list with one for each of "
            f"num_hidden_layers={layers}; got {windows!r}."
        )
    return each[index]


FAMILY = Family(DEFAULTS, attention, names=NAMES, path=at("encoder.layer.{}.attention.self"))
