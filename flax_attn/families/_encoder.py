"""Shared by the families of encoders: the layer, without a mask by default."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, FULL
from ._config import Config
from ._decoder import check_causal


def multi_head(
    config: Config, init: Mapping[str, Any], *, is_decoder: bool = False, **parts: Any
) -> GroupedQueryAttention:
    """Builds the layer from a config's sizes and dropout, with as many key as query heads.

    Args:
      config: of the model.
      init: rngs and dtypes.
      is_decoder: whether the mask is causal.
      parts: further arguments of the layer.

    Raises:
      ValueError: for a decoder with is_causal=False.
    """
    if is_decoder:
        check_causal(config)
    n, h = config.query_heads()
    layer_kwargs = {
        "mask": CAUSAL if is_decoder else FULL,
        "dropout": config.rate("attention_dropout"),
    }
    sizes = (config.count("hidden_size"), n, n, h)
    return GroupedQueryAttention(*sizes, **{**layer_kwargs, **parts}, **init)
