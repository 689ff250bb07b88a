"""LFM2: gated short convolutions in most layers, normalized grouped query attention in others."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..layers import GatedShortConvolution
from ..norms import RMSNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import by_kind, decoder_fields, grouped_query
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(2560, 32, 32, kv_heads=8, positions=128_000, theta=1_000_000.0),
    "norm_eps": 1e-5,
    "layer_types": None,
    "full_attn_idxs": None,
    "conv_bias": False,
    "conv_L_cache": 3,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `conv` of a layer of Lfm2ForCausalLM; there is no dropout."""
    if _is_convolution(config, index):
        size, bias = config.count("conv_L_cache"), config.flag("conv_bias")
        width = config.count("hidden_size")
        return GatedShortConvolution(width, conv_size=size, use_bias=bias, **init)
    h, eps, dtype = config.heads()[2], config.number("norm_eps"), init["param_dtype"]
    norms: dict[str, Any] = {
        name: RMSNorm(h, eps=eps, cast="before", param_dtype=dtype) for name in ("q_norm", "k_norm")
    }
    still = config.replaced(attention_dropout=0.0)
    return grouped_query(still, init, bias=False, rotary=rotary(config), **norms)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Names of full attention; those of the convolution are the layer's own."""
    if _is_convolution(config, index):
        return ()
    norms = (Rule(f"{x}_layernorm.weight -> {x}_norm.scale") for x in ("q", "k"))
    return (*norms, Rule("out_proj -> o_proj"))


def _is_convolution(config: Config, index: int) -> bool:
    def default(index: int) -> str:
        full = config["full_attn_idxs"]
        return "full_attention" if full is None or index in full else "conv"

    return config.layer_type(index, default, "conv") == "conv"


path = by_kind(_is_convolution, "conv")
FAMILY = Family(DEFAULTS, attention, rules, path=path)
