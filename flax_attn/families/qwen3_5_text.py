"""Qwen3.5: Qwen3-Next's layers, with three positions per token, whose sections interleave."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..weights.rule import Rule
from . import qwen3_next
from ._config import Config, Family
from ._rope import rotary

DEFAULTS = {
    **qwen3_next.DEFAULTS,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> nnx.Module:
    """`self_attn` or `linear_attn` of a layer of Qwen3_5ForCausalLM."""
    if qwen3_next.is_linear(config, index):
        return qwen3_next.delta(config, init)
    rope = rotary(config, partial=True, sections=(11, 11, 10), interleaved=True)
    return qwen3_next.gated(config, init, rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Queries, keys and values of the delta rule are fused: all of one after another."""
    if not qwen3_next.is_linear(config, index):
        return ()
    n, k, key, value = qwen3_next.sizes(config)
    parts = (k * key, k * key, n * value)
    return (
        Rule("in_proj_qkv.weight -> {q,k,v}_proj.kernel", "(n o) i -> n i o", o=parts),
        Rule("in_proj_z -> g_proj"),
        Rule("in_proj_b -> b_proj"),
        Rule("in_proj_a -> a_proj"),
        *qwen3_next.ENDS,
    )


FAMILY = Family(DEFAULTS, attention, rules, path=qwen3_next.path)
