"""Shared by DeepSeek's families: latent attention, where YaRN also scales the logits."""

import math
from collections.abc import Mapping
from typing import Any

from ..layers import LatentAttention
from ..positions import Layout
from ..rules import Rules
from ._config import Config
from ._decoder import check_causal
from ._rope import Rope, rope_of, rotary_of

# For the rotary, the width of a head is that of its rotated part.
NAMES = {"head_dim": ("qk_rope_head_dim",)}


def latent(config: Config, init: Mapping[str, Any], layout: Layout | None) -> LatentAttention:
    """Builds the layer from a config's sizes, biases, rotary and dropout; see `arguments`."""
    rope: Rope = {} if layout is None else rope_of(config)
    return LatentAttention(**arguments(config, init, layout, rope))


def arguments(
    config: Config, init: Mapping[str, Any], layout: Layout | None, rope: Rope
) -> dict[str, Any]:
    """Returns the constructor arguments of a layer with latent keys and values.

    Args:
      config: of the model.
      init: rngs and dtypes.
      layout: of the rotary pairs; None for no rotary.
      rope: the rotary parameters.

    Raises:
      ValueError: if num_key_value_heads is not num_attention_heads, or is_causal=False.
    """
    check_causal(config)
    nope, rotary_width = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    bias = config.flag("attention_bias")
    scale = (nope + rotary_width) ** -0.5 * magnitude(rope) ** 2
    return dict(
        in_features=config.count("hidden_size"),
        num_heads=_heads(config),
        kv_rank=config.count("kv_lora_rank"),
        nope_dim=nope,
        rotary_dim=rotary_width,
        value_dim=config.count("v_head_dim"),
        q_rank=None if config["q_lora_rank"] is None else config.count("q_lora_rank"),
        rotary=None if layout is None else rotary_of(config, rope, layout=layout),
        rules=Rules(scale=scale),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **init,
    )


def magnitude(rope: Rope) -> float:
    """Factor of queries and keys in addition to the rotary: `0.1 mscale_all_dim log s + 1`."""
    weight, kind = rope.get("mscale_all_dim"), rope.get("rope_type", "default")
    if kind == "default" or not weight:
        return 1.0
    if "factor" not in rope:
        raise ValueError(f"mscale_all_dim={weight} needs factor beside it, which the config lacks.")
    return 0.1 * weight * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


def _heads(config: Config) -> int:
    n, k = config.count("num_attention_heads"), config["num_key_value_heads"]
    if k not in (None, n):
        raise ValueError(
            "num_key_value_heads must be num_attention_heads or None, since each head has keys of "
            f"its own; got num_key_value_heads={k}, num_attention_heads={n}."
        )
    return n
