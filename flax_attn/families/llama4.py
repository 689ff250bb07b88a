"""Llama 4: chunked attention with a rotary, or full attention with a temperature by position.

Own file: whether a layer rotates decides its norms, its mask and its score.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..masks import CAUSAL, Chunked
from ..norms import RMSNorm
from ..rules import Rules
from ._config import Config, Family
from ._kinds import has_rotary
from ._parts import BIASES, Arguments, decoder
from ._rope import rotary
from ._scores import Temperature


def layer(config: Config, index: int) -> Arguments:
    """The rotary, norms, score and mask of a layer."""
    rotates = has_rotary(config, index)
    arguments: dict[str, Any] = {}
    if rotates:
        arguments["rotary"] = rotary(config, layout="interleaved")
    if rotates and config.flag("use_qk_norm"):
        norm = partial(RMSNorm, None, eps=config.number("rms_norm_eps"))
        arguments |= {"q_norm": norm, "k_norm": norm, "norm_after_rotary": True}
    if config.flag("attn_temperature_tuning") and not rotates:
        score = Temperature(config.number("floor_scale"), config["attn_scale"])
        arguments["rules"] = Rules(score=score)
    default = "chunked_attention" if rotates else "full_attention"
    kind = config.layer_type(index, lambda index: default, "chunked_attention")
    if kind != "chunked_attention":
        return {**arguments, "mask": CAUSAL}
    return {**arguments, "mask": CAUSAL & Chunked(config.count("attention_chunk_size"))}


ROWS: Mapping[str, Family] = {"llama4_text": decoder(layer, BIASES)}
