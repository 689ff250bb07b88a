"""Mistral 4: DeepSeek-V3's attention with YaRN, whose logits grow with the query's position."""

from collections.abc import Mapping
from typing import Any

from ..layers import LatentAttention
from ..rules import Rules
from . import deepseek_v3
from ._config import Config, Family
from ._latent import NAMES, arguments
from ._rope import SHARE, rope_of
from ._tempered import MORE, tempered

DEFAULTS = {
    **deepseek_v3.DEFAULTS,
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0},
        **{"original_max_position_embeddings": 8192, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
    },
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> LatentAttention:
    """`self_attn` of Mistral4ForCausalLM."""
    rope = rope_of(config, MORE)
    _check_share(config, rope.pop(SHARE, None))
    parts = arguments(config, init, deepseek_v3.layout(config), rope)
    parts["rules"] = Rules(score=tempered(config, rope), scale=parts["rules"].scale)
    return LatentAttention(**parts)


def _check_share(config: Config, share: Any) -> None:
    """Raises ValueError unless partial_rotary_factor matches the width of the rotated part."""
    nope, rotary_width = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    if share not in (None, rotary_width / (nope + rotary_width)):
        raise ValueError(
            f"{SHARE} must be qk_rope_head_dim / (qk_nope_head_dim + qk_rope_head_dim), which is "
            f"{rotary_width} / {nope + rotary_width}, or left out; got {share!r}."
        )


FAMILY = Family(DEFAULTS, attention, names=NAMES)
