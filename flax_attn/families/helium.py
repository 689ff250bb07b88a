"""Helium: neighbouring components of a head are rotated; the output has no bias."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2560, 24, 20, kv_heads=20, head_dim=128, positions=4096, theta=100_000.0),
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of HeliumForCausalLM.

    Raises:
      ValueError: for heads that are not as wide as a token together, as its output is.
    """
    n, h = config.query_heads()
    if n * h != config["hidden_size"]:
        raise ValueError(
            f"num_attention_heads * head_dim must be hidden_size; got num_attention_heads={n}, "
            f"head_dim={h}, hidden_size={config['hidden_size']}."
        )
    rope, bias = rotary(config, layout="interleaved"), config.flag("attention_bias")
    return grouped_query(config, init, qkv_bias=bias, rotary=rope)


FAMILY = Family(DEFAULTS, attention)
