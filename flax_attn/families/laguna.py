"""Laguna: heads normalized and gated by a softplus; one rotary for each layer type."""

from collections.abc import Mapping
from typing import Any

from ..layers import GatedQueryAttention
from ._config import Config, Family
from ._decoder import check_causal, mask_of
from ._rope import rotary_by_kind
from .qwen3 import norms

DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": None,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "default", "rope_theta": 500_000.0},
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {
            **{"rope_type": "default", "rope_theta": 10_000.0},
            "partial_rotary_factor": 1.0,
        },
    },
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "layer_types": None,
    "gating": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GatedQueryAttention:
    """`self_attn` of LagunaForCausalLM."""
    check_causal(config)
    kind = config.layer_type(index, lambda index: "full_attention", "sliding_attention")
    config, bias = _with_heads(config, index), config.flag("attention_bias")
    per_head = config["gating"] is True or config["gating"] == "per-head"
    return GatedQueryAttention(
        *(config.count("hidden_size"), *config.heads()),
        gate="head" if per_head else "full",
        activation="softplus",
        rotary=rotary_by_kind(config, kind, partial=True),
        mask=mask_of(config, kind),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **norms(config, init),
        **init,
    )


def _with_heads(config: Config, index: int) -> Config:
    """The config with the number of query heads of one layer."""
    each = config["num_attention_heads_per_layer"]
    if each is None:
        return config
    if len(each) != config.count("num_hidden_layers"):
        raise ValueError(
            "num_attention_heads_per_layer must have an entry for each of num_hidden_layers; got "
            f"{len(each)}."
        )
    return config.replaced(num_attention_heads=each[index])


FAMILY = Family(DEFAULTS, attention)
