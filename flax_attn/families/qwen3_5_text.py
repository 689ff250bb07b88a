"""Qwen3.5: Qwen3-Next's attention with three positions a token, whose pairs take turns.

The layers of linear attention are not built here yet, and are refused.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GatedQueryAttention
from . import qwen3_next
from ._config import Config, Family
from ._rope import rotary

DEFAULTS = {
    **qwen3_next.DEFAULTS,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


def attention(config: Config, index: int, house: Mapping[str, Any]) -> GatedQueryAttention:
    """`self_attn` of a layer of Qwen3_5ForCausalLM that has full attention."""
    turn = rotary(config, partial=True, sections=(11, 11, 10), interleaved=True)
    return qwen3_next.gated(config, index, house, turn)


FAMILY = Family(DEFAULTS, attention)
