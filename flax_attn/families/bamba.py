"""Bamba: Mamba 2 in most layers, attention with half of each head rotated in listed layers."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, decoder_fields, grouped_query
from ._rope import SHARE, rotary
from ._state_space import FIELDS, RULES, head_width, mamba2

HALF = 0.5  # of each head is rotated
DEFAULTS = {
    **decoder_fields(4096, 32, 32, kv_heads=8, positions=262_144, theta=10_000.0),
    **FIELDS,
    SHARE: HALF,
    "attn_layer_indices": None,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `mamba` of a layer of BambaForCausalLM."""
    if not _is_listed(config, index):
        return mamba2(config, init, "rms_norm_eps")
    head_width(config)  # raises what no layer of the class is built with
    if config.entry(SHARE) not in (None, HALF):
        raise ValueError(
            f"{SHARE}={config.entry(SHARE)!r} is not served: transformers takes {HALF} in this "
            "model_type unless its rope_parameters say another."
        )
    rope = rotary(config, partial=True)
    return grouped_query(config, init, bias=config.flag("attention_bias"), rotary=rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Weight rules of the state space layer."""
    return () if _is_listed(config, index) else RULES


def _is_listed(config: Config, index: int) -> bool:
    listed = config["attn_layer_indices"] or []
    if not isinstance(listed, list | tuple):
        raise ValueError(f"attn_layer_indices must list places of layers; got {listed!r}.")
    return index in listed


FAMILY = Family(DEFAULTS, attention, rules, path=by_kind(_is_listed, "self_attn", "mamba"))
