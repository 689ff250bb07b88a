"""StableLM: part of a head rotated, and a separate LayerNorm for each head if configured."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..norms import LayerNorm
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "layer_norm_eps": 1e-5,
    "attention_dropout": 0.0,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of StableLmForCausalLM."""
    eps, dtype = config.number("layer_norm_eps"), init["param_dtype"]
    norms: dict[str, Any] = {
        f"{name}_norm": LayerNorm((heads, config.heads()[2]), eps=eps, param_dtype=dtype)
        for name, heads in _normed(config).items()
    }
    rope, bias = rotary(config, partial=True), config.flag("use_qkv_bias")
    return grouped_query(config, init, qkv_bias=bias, rotary=rope, **norms)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Stacks the norms, one module per head in torch."""
    return tuple(
        Rule(f"{name}_layernorm.norms.{_numbers(heads)}.weight -> {name}_norm.scale", "n h -> n h")
        for name, heads in _normed(config).items()
    )


def _normed(config: Config) -> dict[str, int]:
    """How many heads of queries and of keys have norms."""
    n, k, _ = config.heads()
    return {"q": n, "k": k} if config.flag("qk_layernorm") else {}


def _numbers(heads: int) -> str:
    return f"{{{','.join(map(str, range(heads)))}}}"


FAMILY = Family(DEFAULTS, attention, rules)
