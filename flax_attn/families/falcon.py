"""Falcon: three layouts of the fused weight, and rotary positions or ALiBi by key position.

The bias is that of `sdpa` in transformers, its default there, rounded to bfloat16 and divided by
the root of the head's width. A whole model there with `eager` attention adds it twice.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ..weights.rule import Rule
from ._alibi import RoundedKeyAlibi
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused
from ._rope import rotary

DEFAULTS = {
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": None,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "bias": False,
    "attention_dropout": 0.0,
}
NAMES = {
    "hidden_size": ("hidden_size", "n_embed"),
    "num_key_value_heads": ("num_kv_heads",),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attention` of FalconForCausalLM.

    `attention_dropout` is the layer's with alibi; with rotary positions transformers drops nothing.
    """
    heads = n, _, h = heads_of(config)
    if config.flag("alibi"):
        layer_kwargs: dict[str, Any] = {"rules": Rules(score=RoundedKeyAlibi(n, h**-0.5))}
    else:
        layer_kwargs = {"rotary": rotary(config), "dropout": 0.0}
    return grouped_query(config, init, heads=heads, bias=config.flag("bias"), **layer_kwargs)


def heads_of(config: Config) -> tuple[int, int, int]:
    """N, K and H; K is 1 with multi_query, which the new architecture does not read."""
    is_new = config.flag("new_decoder_architecture")
    if config.flag("multi_query") and not is_new:
        n, h = config.query_heads()
        return n, 1, h
    n, k, h = config.heads()
    if not is_new and k != n:
        raise ValueError(
            f"num_kv_heads={k} needs new_decoder_architecture=True; with multi_query=False each of "
            f"the num_attention_heads={n} has a key of its own."
        )
    return n, k, h


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Layout of `query_key_value`.

    The new architecture: of each key head the queries that share it, the key and the value.
    multi_query: all queries, the key and the value. Neither: of each head query, key and value.
    """
    (n, k, h), bias = heads_of(config), config.flag("bias")
    sizes: dict[str, Any]
    if config.flag("new_decoder_architecture"):
        layout, sizes = "(k n o h) i -> n i (k o h)", {"o": (n // k, 1, 1), "h": h}
    elif config.flag("multi_query"):
        layout, sizes = "(n o) i -> n i o", {"o": (n * h, h, h)}
    else:
        layout, sizes = "(h n d) i -> n i (h d)", {"h": n}
    return (*fused("query_key_value", layout, bias=bias, **sizes), Rule("dense -> o_proj"))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
