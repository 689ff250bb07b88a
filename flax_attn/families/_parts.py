"""Shared by encoder-decoder families: three attentions, each with its fields."""

from collections.abc import Callable, Mapping
from typing import Any

from ..layers import CrossAttention
from ..masks import CAUSAL, FULL, Mask
from ._config import Config, Family
from ._decoder import check_causal

Parts = Mapping[str, Family]
WIDTH = {"hidden_size": ("d_model", "hidden_size")}
ENCODER = {
    **WIDTH,
    "num_hidden_layers": ("encoder_layers", "num_hidden_layers"),
    "num_attention_heads": ("encoder_attention_heads", "num_attention_heads"),
}
DECODER = {
    **WIDTH,
    "num_hidden_layers": ("decoder_layers",),
    "num_attention_heads": ("decoder_attention_heads",),
}


def encoder_decoder(defaults: Mapping[str, Any], *, key_bias: bool) -> Parts:
    """Returns the parts of a model whose layers are all `CrossAttention`.

    Args:
      defaults: as in `Family`.
      key_bias: as in the layer.
    """

    def layer(config: Config, init: Mapping[str, Any], mask: Mask) -> CrossAttention:
        sizes = (config.count("hidden_size"), config.query_heads()[0])
        layer_kwargs: dict[str, Any] = {
            "mask": mask,
            "dropout": config.rate("attention_dropout"),
            **init,
        }
        return CrossAttention(*sizes, key_bias=key_bias, **layer_kwargs)

    def encoder_cross_attention(
        config: Config, index: int, init: Mapping[str, Any]
    ) -> CrossAttention:
        return layer(config, init, FULL)

    def look_back(config: Config, index: int, init: Mapping[str, Any]) -> CrossAttention:
        check_causal(config)
        return layer(config, init, CAUSAL)

    return {
        "encoder": Family(
            defaults, encoder_cross_attention, names=ENCODER, path=at("encoder.layers.{}.self_attn")
        ),
        "decoder": Family(
            defaults, look_back, names=DECODER, path=at("decoder.layers.{}.self_attn")
        ),
        "cross": Family(
            defaults,
            encoder_cross_attention,
            names=DECODER,
            path=at("decoder.layers.{}.encoder_attn"),
        ),
    }


def at(path: str) -> Callable[[Config, int], str]:
    """Returns a family's `path` that is the same for all layers."""
    return lambda config, index: path
