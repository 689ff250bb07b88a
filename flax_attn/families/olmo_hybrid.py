"""OLMo hybrid: a delta rule with negative eigenvalues, OLMo 2's attention in every fourth layer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from . import qwen3_next
from ._config import Config, Family
from ._decoder import by_kind, decoder_fields
from ._fused import convolutions
from ._rope import rotary
from .olmo2 import normed

DEFAULTS = {
    **decoder_fields(3840, 32, 30, positions=65_536, theta=10_000.0),
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "layer_types": None,
    "hidden_act": "silu",
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `linear_attn` of a layer of OlmoHybridForCausalLM."""
    if not _is_gated_delta(config, index):
        return normed(config, init, rotary(config) if _has_rotary(config) else None)
    negative = config.flag("linear_allow_neg_eigval")
    return qwen3_next.delta(_filled(config), init, negative=negative, eps=1e-5)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the delta rule's norm, which is no class of torch."""
    return (Rule("o_norm.weight -> o_norm.scale"),) if _is_gated_delta(config, index) else ()


def saved_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """In files the convolutions of the delta rule are three."""
    if not _is_gated_delta(config, index):
        return ()
    sizes = _filled(config)
    heads = (sizes.count("linear_num_key_heads"), sizes.count("linear_num_value_heads"))
    key = heads[0] * sizes.count("linear_key_head_dim")
    value = heads[1] * sizes.count("linear_value_head_dim")
    return convolutions(key, key, value)


def _has_rotary(config: Config) -> bool:
    """Whether there is a rotary: unless the config says that its base is None."""
    inside = config.entry("rope_parameters") or config.entry("rope_scaling") or {}
    if "rope_theta" in inside:
        return inside["rope_theta"] is not None
    return not config.is_explicit_null("rope_theta")


def _filled(config: Config) -> Config:
    """The config with all sizes of the delta rule."""
    heads = config.count("num_attention_heads")
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
    sizes = {name: config[name] or value for name, value in sizes.items()}
    key = config["linear_key_head_dim"]
    if key is None:
        key = int(0.75 * config.count("hidden_size") / sizes["linear_num_key_heads"])
    value = config["linear_value_head_dim"]
    value = 2 * key if value is None else value
    return config.replaced(**sizes, linear_key_head_dim=key, linear_value_head_dim=value)


def _is_gated_delta(config: Config, index: int) -> bool:
    def default(index: int) -> str:
        last = config.count("num_hidden_layers") - 1
        full = index % 4 == 3 or (index == last and last < 3)
        return "full_attention" if full else "linear_attention"

    return config.layer_type(index, default, "linear_attention") == "linear_attention"


FAMILY = Family(DEFAULTS, attention, rules, path=by_kind(_is_gated_delta, "linear_attn"))
