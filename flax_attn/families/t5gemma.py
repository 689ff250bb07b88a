"""T5Gemma: Gemma 2's attention in a bidirectional encoder and a decoder.

Each of the two has a config of its own within the model's, which alone says the dropout. Cross
attention is not served: its heads have a width of their own, and its logits a scale and a cap.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import FULL, Window
from . import gemma2
from ._config import NONE, Config, Family
from ._decoder import alternating
from ._parts import Parts, at

# What Gemma 2 refuses, and no class of this model reads.
UNREAD = {"use_bidirectional_attention": None, "is_causal": None}
DEFAULTS = {k: v for k, v in gemma2.DEFAULTS.items() if k not in UNREAD}
NESTED = {"encoder": None, "decoder": None}


def encoder(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of the encoder's layers, whose windows reach as far ahead as behind."""
    kind = config.layer_type(index, alternating, "sliding_attention")
    reach = config.count("sliding_window") if kind == "sliding_attention" else None
    mask = FULL if reach is None else Window(reach, reach)
    return gemma2.capped(config, init, mask)


def nested(part: str) -> Callable[[Config], Config]:
    """The config of a part, with the dropout of the whole."""

    def derived(config: Config) -> Config:
        fields = config.entry(part)
        if fields is not None and not isinstance(fields, Mapping):
            raise ValueError(f"{part} must be a config of its own, a dict; got {fields!r}.")
        dropout = {"attention_dropout": config["attention_dropout"]}
        return Config({**(fields or {}), **dropout}, DEFAULTS, NONE, UNREAD)

    return derived


FAMILY: Parts = {
    "encoder": Family(
        {**DEFAULTS, **NESTED},
        encoder,
        path=at("encoder.layers.{}.self_attn"),
        derived=nested("encoder"),
    ),
    "decoder": Family(
        {**DEFAULTS, **NESTED},
        gemma2.attention,
        path=at("decoder.layers.{}.self_attn"),
        derived=nested("decoder"),
    ),
}
