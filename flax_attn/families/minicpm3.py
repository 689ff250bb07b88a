"""MiniCPM3: DeepSeek-V2's attention, with rotary pairs of halves."""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_divides
from ..layers import LatentAttention
from ._config import Config, Family
from ._latent import NAMES, latent

DEFAULTS = {
    "hidden_size": 2560,
    "num_hidden_layers": 62,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """`self_attn` of MiniCPM3ForCausalLM; values are hidden_size / heads wide unless configured."""
    n, width = config.count("num_attention_heads"), config.count("hidden_size")
    each = check_divides("num_attention_heads", n, "hidden_size", width)
    wide = config if config["v_head_dim"] is not None else config.replaced(v_head_dim=each)
    return latent(wide, init, "half")


FAMILY = Family(DEFAULTS, attention, names=NAMES)
