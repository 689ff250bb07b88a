"""AFMoE: heads normalized and gated; a window and a rotary in all layers but every fourth."""

from collections.abc import Mapping
from typing import Any

from ..layers import GatedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import check_causal, decoder_fields, mask_of
from ._rope import rotary
from .qwen3 import norms

DEFAULTS = {
    **decoder_fields(2048, 32, 16, head_dim=128, positions=16_384, theta=10_000.0),
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "layer_types": None,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GatedQueryAttention:
    """`self_attn` of AfmoeForCausalLM."""

    def default(index: int) -> str:
        last = (index + 1) % config.count("global_attn_every_n_layers") == 0
        return "full_attention" if last else "sliding_attention"

    check_causal(config)
    kind, bias = (
        config.layer_type(index, default, "sliding_attention"),
        config.flag("attention_bias"),
    )
    rope = rotary(config)  # what is wrong in it is told of all layers
    return GatedQueryAttention(
        *(config.count("hidden_size"), *config.heads()),
        rotary=rope if kind == "sliding_attention" else None,
        mask=mask_of(config, kind),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **norms(config, init),
        **init,
    )


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the gate's name."""
    return (Rule("gate_proj -> g_proj"),)


FAMILY = Family(DEFAULTS, attention, rules)
