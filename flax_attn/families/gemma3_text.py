"""Gemma 3: five layers with a window and another rotary for each full attention layer."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, FULL, Mask, Window
from ..norms import RMSNorm
from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import causal_window, decoder_fields, grouped_query
from ._gguf import names
from ._rope import KINDS, rotary_of_kind

DEFAULTS = {
    **decoder_fields(2304, 26, 8, kv_heads=4, head_dim=256, positions=131_072, theta=1_000_000.0),
    "rope_local_base_freq": 10_000.0,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "layer_types": None,
    "use_bidirectional_attention": False,
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Gemma3ForCausalLM."""

    def default(index: int) -> str:
        return KINDS[(index + 1) % config.count("sliding_window_pattern") != 0]

    kind = config.layer_type(index, default, "sliding_attention")
    if config.entry("sliding_window_pattern") is not None and kind != default(index):
        raise ValueError(
            f"layer_types and sliding_window_pattern={config['sliding_window_pattern']} differ on "
            f"layer {index}; leave one of them out."
        )
    h, eps, dtype = config.heads()[2], config.number("rms_norm_eps"), init["param_dtype"]
    norms: dict[str, Any] = {
        name: RMSNorm(h, eps=eps, plus_one=True, param_dtype=dtype) for name in ("q_norm", "k_norm")
    }
    rules = Rules(scale=config.number("query_pre_attn_scalar") ** -0.5)
    rope = rotary_of_kind(config, kind, "rope_local_base_freq")
    parts = {"rotary": rope, "mask": mask(config, kind), "rules": rules, **norms}
    return grouped_query(config, init, bias=config.flag("attention_bias"), **parts)


def mask(config: Config, kind: str) -> Mask:
    """Causal, or with use_bidirectional_attention half of the window on each side."""
    if config.flag("use_bidirectional_attention"):
        half = config.count("sliding_window") // 2
        return Window(half, half) if kind == "sliding_attention" else FULL
    return causal_window(config) if kind == "sliding_attention" else CAUSAL


def gguf(config: Config, index: int) -> tuple[Rule, ...]:
    """llama.cpp's files store a norm's gain as 1 + w, transformers' as w."""
    gains = (Rule.shifted(f"attn_{x}_norm -> {x}_norm", by=-1.0) for x in "qk")
    return (*gains, *names("q", "k", "v", "output"), Rule.skip("post_*"))


FAMILY = Family(DEFAULTS, attention, gguf=gguf)
