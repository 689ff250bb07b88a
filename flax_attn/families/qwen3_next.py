"""Qwen3-Next: gated grouped query attention in every fourth layer, a delta rule in the others."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from .._internal.checks import check_choice, check_divides
from ..layers import GatedDeltaAttention, GatedQueryAttention
from ..norms import RMSNorm
from ..positions import Rotary
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, check_causal, decoder_fields
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2048, 48, 16, kv_heads=2, head_dim=256, positions=32_768, theta=10_000.0),
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "layer_types": None,
    "full_attention_interval": 4,
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# What the delta rule calls otherwise than its class in transformers.
ENDS = (Rule("norm.weight -> o_norm.scale"), Rule("out_proj -> o_proj"))


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `linear_attn` of a layer of Qwen3NextForCausalLM."""
    if is_linear(config, index):
        return delta(config, init)
    return gated(config, init, rotary(config, partial=True))


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """The delta rule's projections are fused by heads of keys: the parts of one after another."""
    if not is_linear(config, index):
        return ()
    n, k, key, value = sizes(config)
    qkvz = (key, key, n // k * value, n // k * value)
    heads = "(g n o) i -> n i (g o)"
    return (
        Rule("in_proj_qkvz.weight -> {q,k,v,g}_proj.kernel", heads, o=qkvz),
        Rule("in_proj_ba.weight -> {b,a}_proj.kernel", heads, o=(n // k, n // k)),
        *ENDS,
    )


def is_linear(config: Config, index: int) -> bool:
    """Whether a layer has the delta rule, by layer_types or full_attention_interval."""

    def default(index: int) -> str:
        linear = (index + 1) % config.count("full_attention_interval")
        return "linear_attention" if linear else "full_attention"

    return config.layer_type(index, default, "linear_attention") == "linear_attention"


def sizes(config: Config) -> tuple[int, int, int, int]:
    """How many heads of values and of keys the delta rule has, and the widths of key and value."""
    n, k = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    check_divides("linear_num_key_heads", k, "linear_num_value_heads", n)
    return n, k, config.count("linear_key_head_dim"), config.count("linear_value_head_dim")


def delta(config: Config, init: Mapping[str, Any], **parts: Any) -> GatedDeltaAttention:
    """The layer of linear attention; `parts` are further arguments.

    Raises:
      ValueError: for a hidden_act that is not silu, which the convolution would apply.
    """
    check_choice("hidden_act", config["hidden_act"], "silu", "swish")
    n, k, key, value = sizes(config)
    layer_kwargs: dict[str, Any] = {"eps": config.number("rms_norm_eps"), **parts, **init}
    return GatedDeltaAttention(
        config.count("hidden_size"),
        n,
        key,
        value,
        num_key_heads=k,
        conv_size=config.count("linear_conv_kernel_dim"),
        **layer_kwargs,
    )


def gated(config: Config, init: Mapping[str, Any], rope: Rotary) -> GatedQueryAttention:
    """The layer of full attention, with this rotary."""
    check_causal(config)
    shape, dtype = (config.count("hidden_size"), *config.heads()), init["param_dtype"]
    norm = {"eps": config.number("rms_norm_eps"), "plus_one": True, "param_dtype": dtype}
    bias = config.flag("attention_bias")
    return GatedQueryAttention(
        *shape,
        fused=True,
        rotary=rope,
        q_norm=RMSNorm(shape[-1], **norm),
        k_norm=RMSNorm(shape[-1], **norm),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **init,
    )


path = by_kind(is_linear, "linear_attn")
FAMILY = Family(DEFAULTS, attention, rules, path=path)
