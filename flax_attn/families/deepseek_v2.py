"""DeepSeek-V2: keys and values from one latent per token; neighbouring components are rotated."""

from collections.abc import Mapping
from typing import Any

from ..layers import LatentAttention
from ._config import Config, Family
from ._latent import NAMES, latent

DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """`self_attn` of DeepseekV2ForCausalLM."""
    return latent(config, init, "interleaved")


FAMILY = Family(DEFAULTS, attention, names=NAMES)
