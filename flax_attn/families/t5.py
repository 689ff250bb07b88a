"""T5: unscaled, with a bias by bucketed distance that the first layer of a stack owns.

Layers after the first take it as an argument, `layer(x, bias=first.score)`, as a model does. Cross
attention, `EncDecAttention` in its files, has none.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import T5Attention
from ..masks import CAUSAL
from ._config import Config, Family, SameAs
from ._decoder import check_causal
from ._parts import at

DEFAULTS = {
    "d_model": 512,
    "d_kv": 64,
    "num_heads": 8,
    "num_layers": 6,
    "num_decoder_layers": SameAs("num_layers"),
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
}
NAMES = {
    "hidden_size": ("d_model", "hidden_size"),
    "head_dim": ("d_kv", "head_dim"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "attention_dropout": ("dropout_rate",),
}
ENCODER = {**NAMES, "num_hidden_layers": ("num_layers", "num_hidden_layers")}
DECODER = {**NAMES, "num_hidden_layers": ("num_decoder_layers",)}


def layer(
    config: Config, init: Mapping[str, Any], *, bidirectional: bool = True, **parts: Any
) -> T5Attention:
    """A layer of a config's sizes, buckets and dropout.

    Raises:
      ValueError: unless max distance exceeds the number of exact buckets.
    """
    n, h = config.query_heads()
    names = ("relative_attention_num_buckets", "relative_attention_max_distance")
    buckets, max_distance = map(config.count, names)
    exact = buckets // (4 if bidirectional else 2)
    if not 1 <= exact < max_distance:
        raise ValueError(
            f"{names[1]} must exceed the {exact} distances that have a bucket each, and there must "
            f"be one; got {names[0]}={buckets}, {names[1]}={max_distance}."
        )
    layer_kwargs: dict[str, Any] = {
        "buckets": buckets,
        "max_distance": max_distance,
        "bidirectional": bidirectional,
    }
    layer_kwargs["dropout"] = config.rate("attention_dropout")
    return T5Attention(config.count("hidden_size"), n, h, **layer_kwargs, **parts, **init)


def encoder(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
    """`SelfAttention` of the encoder's blocks."""
    return layer(config, init, has_bias=index == 0)


def decoder(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
    """`SelfAttention` of the decoder's blocks."""
    check_causal(config)
    return layer(config, init, has_bias=index == 0, bidirectional=False, mask=CAUSAL)


def cross(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
    """`EncDecAttention` of the decoder's blocks."""
    return layer(config, init, has_bias=False)


IN_ENCODER = at("encoder.block.{}.layer.0.SelfAttention")
IN_DECODER = at("decoder.block.{}.layer.0.SelfAttention")
ACROSS = at("decoder.block.{}.layer.1.EncDecAttention")
FAMILY = {
    "encoder": Family(DEFAULTS, encoder, names=ENCODER, path=IN_ENCODER),
    "decoder": Family(DEFAULTS, decoder, names=DECODER, path=IN_DECODER),
    "cross": Family(DEFAULTS, cross, names=DECODER, path=ACROSS),
}
