"""DeepSeek-V3 and R1: DeepSeek-V2's attention, with a configurable layout of rotary pairs."""

from collections.abc import Mapping
from typing import Any

from ..layers import LatentAttention
from ..positions import Layout
from ._config import Config, Family
from ._latent import latent

DEFAULTS = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "rope_interleave": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """`self_attn` of DeepseekV3ForCausalLM."""
    return latent(config, init, layout(config))


def layout(config: Config) -> Layout:
    """Layout of the rotary pairs, by `rope_interleave`."""
    return "interleaved" if config.flag("rope_interleave") else "half"


# The class derives head_dim, and takes a rotary of another width from a file that has it.
NAMES = {"head_dim": ("qk_rope_head_dim", "head_dim")}
FAMILY = Family(DEFAULTS, attention, names=NAMES)
