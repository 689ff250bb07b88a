"""Latent attention: DeepSeek, and models whose attention is a variation of it.

Own file: keys and values come from a latent, YaRN also scales the logits, and an indexer chooses
keys.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._internal.checks import check_divides
from ..layers import IndexedSparseAttention, LatentAttention
from ..positions import Layout
from ..rules import Rules
from ._config import Config, Family
from ._kinds import check_causal
from ._rope import SHARE, Rope, rope_of, rotary_of, shares_in_file
from ._scores import TEMPERATURE_FIELDS, temperature

NAMES = {"head_dim": ("qk_rope_head_dim",)}  # of the rotary, which is of a part of the head


def latent(
    layout: Layout | None,
) -> Callable[[Config, int, Mapping[str, Any]], LatentAttention]:
    """Builds the layer from a config's sizes, biases, rotary and dropout; see `arguments`."""

    def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
        rope: Rope = {} if layout is None else rope_of(config)
        return LatentAttention(**arguments(config, init, layout, rope))

    return attention


def deepseek_v3(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """DeepSeek-V2's, with a configurable layout of rotary pairs."""
    return latent(rotary_layout(config))(config, index, init)


def arguments(
    config: Config, init: Mapping[str, Any], layout: Layout | None, rope: Rope
) -> dict[str, Any]:
    """Returns the constructor arguments of a layer with latent keys and values.

    Args:
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
    factor = rope["factor"]
    for name, number in (("mscale_all_dim", weight), ("factor", factor)):
        if not isinstance(number, int | float):
            raise ValueError(f"{name} must be a number; got {number!r}.")
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _heads(config: Config) -> int:
    n, k = config.count("num_attention_heads"), config["num_key_value_heads"]
    if k not in (None, n):
        raise ValueError(
            "num_key_value_heads must be num_attention_heads or None, since each head has keys of "
            f"its own; got num_key_value_heads={k}, num_attention_heads={n}."
        )
    return n


def rotary_layout(config: Config) -> Layout:
    """Layout of the rotary pairs, by `rope_interleave`."""
    return "interleaved" if config.flag("rope_interleave") else "half"


def deepseek_v32(config: Config, index: int, init: Mapping[str, Any]) -> IndexedSparseAttention:
    """DeepSeek-V3's attention over the keys that an indexer chooses."""
    return _indexed(config, index, init, "half")


def glm_moe_dsa(config: Config, index: int, init: Mapping[str, Any]) -> IndexedSparseAttention:
    """GLM-5's: its indexer rotates neighbouring components as the attention does.

    Raises:
      ValueError: for a layer that reads the choice of an earlier one.
    """
    if _indexer_type(config, index) != "full":
        raise ValueError(
            f"Layer {index} is not served: by indexer_types, or index_topk_freq and "
            "index_topk_pattern, it has no indexer and reads the choice of an earlier layer."
        )
    return _indexed(config, index, init, "interleaved")


def _indexer_type(config: Config, index: int) -> str:
    """ "full" or "shared": by indexer_types, by a pattern, or all but each n-th shared."""
    name = "indexer_types" if config["indexer_types"] else "index_topk_pattern"
    if config[name] is not None:
        letter = str(config.of_layer(name, index))
        return {"F": "full", "S": "shared"}.get(letter, letter)
    after = max(index - config.whole("index_skip_topk_offset") + 1, 0)
    return "shared" if after % max(config.whole("index_topk_freq"), 1) else "full"


def _indexed(
    config: Config, index: int, init: Mapping[str, Any], layout: Layout
) -> IndexedSparseAttention:
    config.count("q_lora_rank")  # queries of the indexer are made of their latent
    config.layer_type(index, lambda index: "indexed_attention", "indexed_attention")
    parts = arguments(config, init, "interleaved", rope_of(config))
    return IndexedSparseAttention(
        **parts,
        index_heads=config.count("index_n_heads"),
        index_dim=config.count("index_head_dim"),
        top_k=config.count("index_topk"),
        index_rotary=replace(parts["rotary"], layout=layout),
    )


def minicpm3(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """Values are hidden_size / heads wide unless configured; rotary pairs are of halves."""
    n, width = config.count("num_attention_heads"), config.count("hidden_size")
    each = check_divides("num_attention_heads", n, "hidden_size", width)
    config = config if config["v_head_dim"] is not None else config.replaced(v_head_dim=each)
    return latent("half")(config, index, init)


def mistral4(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """DeepSeek-V3's attention with YaRN, whose logits grow with the query's position."""
    rope = rope_of(config, TEMPERATURE_FIELDS)
    rope.pop(SHARE, None)
    _check_share(config)
    parts = arguments(config, init, rotary_layout(config), rope)
    parts["rules"] = Rules(score=temperature(config, rope), scale=parts["rules"].scale)
    return LatentAttention(**parts)


def _check_share(config: Config) -> None:
    """Raises ValueError unless partial_rotary_factor matches the width of the rotated part."""
    nope, rotary_width = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    share = rotary_width / (nope + rotary_width)
    if others := [x for x in shares_in_file(config) if x not in (None, share)]:
        raise ValueError(
            f"{SHARE} must be qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim), which is "
            f"{rotary_width} / {nope + rotary_width}, or left out; got {others[0]!r}."
        )


ROWS: Mapping[str, Family] = {
    "deepseek_v2": Family(latent("interleaved"), names=NAMES),
    # The class derives head_dim, and takes a rotary of another width from a file that has it.
    "deepseek_v3": Family(deepseek_v3, names={"head_dim": ("qk_rope_head_dim", "head_dim")}),
    "deepseek_v32": Family(deepseek_v32, names=NAMES),
    "glm_moe_dsa": Family(
        glm_moe_dsa,
        names=NAMES,
        defaults={"index_topk_pattern": None, "index_topk_freq": 1, "index_skip_topk_offset": 2},
    ),
    "minicpm3": Family(minicpm3, names=NAMES),
    "mistral4": Family(mistral4, names=NAMES),
}
