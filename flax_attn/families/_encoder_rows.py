"""Encoder model types that share another family's attention under different names."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import FULL
from ..weights.rule import Rule
from . import llama, siglip
from ._config import Config, Family
from ._decoder import grouped_query
from ._encoder import multi_head
from ._rope import rotary

FOUR = ("q_proj", "k_proj", "v_proj", "o_proj")
BY_PROBABILITY = {"attention_dropout": ("attention_probs_dropout_prob",)}


def called(*names: str, skipped: str | None = None) -> Any:
    """Returns the `rules` for query, key, value and output projections with these names.

    >>> print(*called("query", "key", "value", "dense")(Config({}, {}), 0)[:1])
    Rule("query -> q_proj")
    """
    renamed = [Rule(f"{x} -> {y}") for x, y in zip(names, FOUR, strict=True) if x != y]
    skips = [Rule.skip(skipped)] if skipped else []
    return lambda config, index: (*renamed, *skips)


def causal(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of CLIPTextModel, which is causal."""
    return multi_head(config, init, is_decoder=True, qkv_bias=True, out_bias=True)


def llama_encoder(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of EuroBertModel: Llama's without a mask."""
    parts = {"rotary": rotary(config), "mask": FULL}
    looks_ahead = config.replaced(is_causal=None)  # its class ignores the value
    return grouped_query(looks_ahead, init, bias=config.flag("attention_bias"), **parts)


def llama_encoder_unbiased(
    config: Config, index: int, init: Mapping[str, Any]
) -> GroupedQueryAttention:
    """`self_attn` of NomicBertModel, which has no biases."""
    return multi_head(config, init, qkv_bias=False, out_bias=False, rotary=rotary(config))


def group(config: Config, index: int) -> str:
    """Path of the attention that an ALBERT layer shares with the others of its group."""
    each = config.count("num_hidden_layers") / config.count("num_hidden_groups")
    return f"encoder.albert_layer_groups.{int(index / each)}.albert_layers.0.attention"


ROWS: Mapping[str, Family] = {
    # ALBERT: BERT's, with the output projection in the same module, followed by a norm.
    "albert": Family(
        {
            "hidden_size": 4096,
            "num_hidden_layers": 12,
            "num_hidden_groups": 1,
            "num_attention_heads": 64,
            "attention_probs_dropout_prob": 0.0,
        },
        siglip.attention,
        called("query", "key", "value", "dense", skipped="LayerNorm"),
        BY_PROBABILITY,
        path=group,
    ),
    "clip_text_model": Family(
        {**siglip.DEFAULTS, "hidden_size": 512, "num_attention_heads": 8}, causal, siglip.rules
    ),
    "clip_vision_model": Family(siglip.DEFAULTS, siglip.attention, siglip.rules),
    "distilbert": Family(
        {"dim": 768, "n_layers": 6, "n_heads": 12, "attention_dropout": 0.1},
        siglip.attention,
        called("q_lin", "k_lin", "v_lin", "out_lin"),
        {
            "hidden_size": ("dim", "hidden_size"),
            "num_hidden_layers": ("n_layers", "num_hidden_layers"),
            "num_attention_heads": ("n_heads", "num_attention_heads"),
        },
    ),
    "eurobert": Family(
        {
            **llama.DEFAULTS,
            **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
            "max_position_embeddings": 8192,
        },
        llama_encoder,
    ),
    "hubert": Family({**siglip.DEFAULTS, "attention_dropout": 0.1}, siglip.attention, siglip.rules),
    "idefics3_vision": Family(
        {**siglip.DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16},
        siglip.attention,
        siglip.rules,
    ),
    "nomic_bert": Family(
        {
            **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
            **{"head_dim": None, "attention_probs_dropout_prob": 0.0},
            **{"max_position_embeddings": 2048, "rope_theta": 1000.0},
        },
        llama_encoder_unbiased,
        names=BY_PROBABILITY,
    ),
    "wav2vec2": Family(
        {**siglip.DEFAULTS, "attention_dropout": 0.1}, siglip.attention, siglip.rules
    ),
}
