"""DiffLlama: each head's weights minus a multiple of another's, and no dropout.

Own file: its layer is told its number.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import DifferentialAttention
from ._config import Config, Family
from ._kinds import check_causal
from ._rope import rotary


def attention(config: Config, index: int, init: Mapping[str, Any]) -> DifferentialAttention:
    """`self_attn` of DiffLlamaForCausalLM.

    Raises:
      ValueError: for dropout of the weights, which its class refuses, and for heads without pairs.
    """
    check_causal(config)
    if config.rate("attention_dropout"):
        raise ValueError(
            f"attention_dropout={config['attention_dropout']} is not served: nobody says what of "
            "the difference is dropped; it must be 0."
        )
    (n, k, h), bias = config.heads(), config.flag("attention_bias")
    if k % 2:
        raise ValueError(f"num_key_value_heads must be even, since heads are in pairs; got {k}.")
    return DifferentialAttention(
        *(config.count("hidden_size"), n, k, h, index),
        rotary=rotary(config),
        eps=config.number("rms_norm_eps"),
        qkv_bias=bias,
        out_bias=bias,
        **init,
    )


ROWS = {"diffllama": Family(attention)}
