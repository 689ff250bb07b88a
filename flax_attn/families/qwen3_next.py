"""Qwen3-Next: in every fourth layer grouped queries with a gate, in the others a linear attention.

The layers of linear attention are not built here yet, and are refused.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GatedQueryAttention
from ..norms import RMSNorm
from ..positions import Rotary
from ._config import Config, Family
from ._decoder import check_causal
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "layer_types": None,
    "full_attention_interval": 4,
    "attention_bias": False,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GatedQueryAttention:
    """`self_attn` of a layer of Qwen3NextForCausalLM that has full attention."""
    return gated(config, index, house, rotary(config, partial=True))


def gated(
    config: Config, index: int, house: Mapping[str, Any], turn: Rotary
) -> GatedQueryAttention:
    """The layer, with this rotary.

    Raises:
      ValueError: for a layer of linear attention.
    """
    check_causal(config)
    _check_full(config, index)
    sizes, dtype = (config.count("hidden_size"), *config.heads()), house["param_dtype"]
    norm = {"eps": config.number("rms_norm_eps"), "plus_one": True, "param_dtype": dtype}
    bias = config.flag("attention_bias")
    return GatedQueryAttention(
        *sizes,
        fused=True,
        rotary=turn,
        q_norm=RMSNorm(sizes[-1], **norm),
        k_norm=RMSNorm(sizes[-1], **norm),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **house,
    )


def _check_full(config: Config, index: int) -> None:
    def default(index: int) -> str:
        linear = (index + 1) % config.count("full_attention_interval")
        return "linear_attention" if linear else "full_attention"

    if config.layer_type(index, default, "linear_attention") == "linear_attention":
        raise ValueError(
            f"Layer {index} has linear_attention, by layer_types or, without them, by "
            f"full_attention_interval={config['full_attention_interval']}; that gated delta rule "
            "is not built here yet, so ask for a layer that has full_attention."
        )


FAMILY = Family(DEFAULTS, attention)
