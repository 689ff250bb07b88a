"""MiniMax-M2: queries and keys normalized over all heads, and part of each head rotated."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._rope import SHARE, rotary
from .olmo2 import norms

DEFAULTS = {
    **decoder_fields(3072, 62, 48, kv_heads=8, head_dim=128, positions=196_608, theta=5_000_000.0),
    "rms_norm_eps": 1e-6,
    "rotary_dim": None,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of MiniMaxM2ForCausalLM."""
    rope = rotary(_with_share(config), partial=True)
    return grouped_query(config, init, bias=False, rotary=rope, **norms(config, init, "before"))


def _with_share(config: Config) -> Config:
    """The config whose share of a head that rotates is what `rotary_dim` says.

    Raises:
      ValueError: if its rotary parameters say another.
    """
    if config["rotary_dim"] is None:
        return config
    width, (_, h) = config.count("rotary_dim"), config.query_heads()
    named = [config.entry(name) for name in ("rope_parameters", "rope_scaling")]
    shares = [config.entry(SHARE), *(x.get(SHARE) for x in named if isinstance(x, Mapping))]
    if any(share not in (None, width / h) for share in shares):
        raise ValueError(
            f"rotary_dim={width} of head_dim={h} and {SHARE} in the rotary parameters differ; "
            "leave one of them out."
        )
    return config.replaced(**{SHARE: width / h})


FAMILY = Family(DEFAULTS, attention)
