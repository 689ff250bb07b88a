"""Gemma 3n: unscaled logits, normalized values, and later layers that reuse keys of earlier ones.

The last `num_kv_shared_layers` make no keys and values. They are `CrossLayerAttention`s, called as
those of Gemma 4 are.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import CrossLayerAttention, SharedKeyValueAttention
from ._config import Config, Family
from ._decoder import decoder_fields, mask_of
from ._rope import rotary_of_kind
from .gemma4_text import reuses, sharing

DEFAULTS = {
    **decoder_fields(2048, 35, 8, kv_heads=2, head_dim=256, positions=32_768, theta=1_000_000.0),
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "layer_types": None,
    "num_kv_shared_layers": 15,
    "attention_bias": False,
}


def attention(
    config: Config, index: int, init: Mapping[str, Any]
) -> CrossLayerAttention | SharedKeyValueAttention:
    """`self_attn` of Gemma3nForCausalLM."""
    kind = kind_of(config, index)
    rope = rotary_of_kind(config, kind, "rope_local_base_freq")
    parts = {"rotary": rope, "mask": mask_of(config, kind)}
    return sharing(config, init, reuses(config, index, kind_of), own_values=True, **parts)


def kind_of(config: Config, index: int) -> str:
    """The type of a layer: by default every fifth has full attention."""

    def default(index: int) -> str:
        return "sliding_attention" if (index + 1) % 5 else "full_attention"

    return config.layer_type(index, default, "sliding_attention")


FAMILY = Family(DEFAULTS, attention)
