"""Phi-3.5-MoE: Mistral with biases, whose LongRoPE has its own magnitude.

transformers 5.23 takes the short factors at every length, and so does this layer.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..positions import Frequencies, Rotary
from ._config import Config, Family, above_zero
from ._decoder import decoder_fields
from ._rope import rope_of, rotary_of
from .mistral import windowed

DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=131_072, theta=1_000_000.0),
    "sliding_window": None,
    "attention_bias": False,
}
MAGNITUDES = ("short_mscale", "long_mscale")


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of PhimoeForCausalLM."""
    return windowed(
        config, init, bias=config.flag("attention_bias"), rotary=_constant_rotary(config)
    )


def _constant_rotary(config: Config) -> Rotary:
    """A plain rotary, or one scaled by the short factors.

    Raises:
      ValueError: for other kinds, and for magnitudes that differ by the length of the sequence.
    """
    rope = rope_of(config, MAGNITUDES)
    if rope["rope_type"] == "default":
        return rotary_of(config, rope)
    if rope["rope_type"] != "longrope":
        raise ValueError(f"rope_type must be default or longrope; got {rope['rope_type']!r}.")
    short, long = (above_zero(name, rope.get(name)) for name in MAGNITUDES)
    if short != long:
        raise ValueError(
            "short_mscale and long_mscale must be equal, since the magnitude of a rotary does not "
            f"follow the length here; got {short} and {long}."
        )
    plain_rotary = rotary_of(config, rope)
    assert plain_rotary.scaling is not None
    rates = plain_rotary.scaling.rates(plain_rotary.base, config.heads()[2], 1)
    return Rotary(scaling=Frequencies(rates, short))


FAMILY = Family(DEFAULTS, attention)
