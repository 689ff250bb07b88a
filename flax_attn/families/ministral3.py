"""Ministral 3: Mistral with YaRN, whose logits grow with the query's position."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ._config import Config, Family
from ._decoder import decoder_fields
from ._rope import rope_of, rotary_of
from ._tempered import MORE, tempered
from .mistral import windowed

DEFAULTS = {
    **decoder_fields(4096, 34, 32, kv_heads=8, head_dim=128, positions=262_144, theta=10_000.0),
    "sliding_window": None,
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0},
        **{"original_max_position_embeddings": 16_384, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1},
    },
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Ministral3ForCausalLM."""
    rope = rope_of(config, MORE)
    rules = Rules(score=tempered(config, rope))
    return windowed(config, init, bias=False, rotary=rotary_of(config, rope), rules=rules)


FAMILY = Family(DEFAULTS, attention)
