"""T5: unscaled, with a bias by bucketed distance that the first layer of a stack owns.

Layers after the first take it as an argument, `layer(x, bias=first.score)`, as a model does. Cross
attention, `EncDecAttention` in its files, has none. UMT5 has a bias in every layer. Own file: the
bias is a trained part of the layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..layers import T5Attention
from ..masks import CAUSAL
from ._config import ByPart, Config, Family
from ._kinds import check_causal
from ._parts import at

NAMES = {
    "head_dim": ("d_kv", "head_dim"),
    "attention_dropout": ("dropout_rate",),
}
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


def part(
    names: Any, module: str, has_bias: Callable[[int], bool], is_decoder: bool = False
) -> Family:
    """The row of one of the attentions.

    Args:
      names: of its fields.
      module: its path.
      has_bias: whether a layer owns a bias.
      is_decoder: whether it is causal, with a bias by distances to the past alone.
    """

    def attention(config: Config, index: int, init: Mapping[str, Any]) -> T5Attention:
        if not is_decoder:
            return layer(config, init, has_bias=has_bias(index))
        check_causal(config)
        how = {"bidirectional": False, "mask": CAUSAL, "has_bias": has_bias(index)}
        return layer(config, init, **how)

    return Family(attention, names=names, path=at(module), derived=_decoder_depth)


def _decoder_depth(config: Config) -> Config:
    """The config whose decoder is as deep as its encoder, unless it says otherwise."""
    if config.defaults.get("num_decoder_layers") is not None:
        return config
    return config.with_defaults(num_decoder_layers=config["num_layers"])


def rows(has_bias: Callable[[int], bool]) -> ByPart:
    """The rows of a model; in `cross`, no layer has a bias."""
    block = "{}.block.{{}}.layer.{}"
    return {
        "encoder": part(NAMES, block.format("encoder", "0.SelfAttention"), has_bias),
        "decoder": part(DECODER, block.format("decoder", "0.SelfAttention"), has_bias, True),
        "cross": part(DECODER, block.format("decoder", "1.EncDecAttention"), lambda index: False),
    }


ROWS: Mapping[str, ByPart] = {
    "t5": rows(lambda index: index == 0),
    "umt5": rows(lambda index: True),
}
