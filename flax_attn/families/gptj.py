"""GPT-J and CodeGen: neighbouring components of a part of a head are rotated; no biases."""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_divides
from ..layers import GroupedQueryAttention
from ..positions import Rotary
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query

DEFAULTS = {
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "attn_pdrop": 0.0,
}
NAMES = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "attention_dropout": ("attn_pdrop",),
}
SHARDS = 4  # of CodeGen's fused weight, whatever a file says


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of GPTJForCausalLM and CodeGenForCausalLM, but for the dropout of its output."""
    (n, h), width = config.query_heads(), config.count("rotary_dim")
    if width % 2 or width > h:
        raise ValueError(
            "rotary_dim must be an even number of components of a head, which is "
            f"{config.name('hidden_size')} / {config.name('num_attention_heads')} = {h} wide; got "
            f"rotary_dim={width}."
        )
    rope = Rotary(10_000.0, "interleaved", width)
    return grouped_query(config, init, heads=(n, n, h), bias=False, rotary=rope)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the output projection's name."""
    return (Rule("out_proj -> o_proj"),)


def sharded(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of CodeGen, whose heads are stored in four parts."""
    check_divides("4", SHARDS, config.name("num_attention_heads"), config.query_heads()[0])
    return attention(config, index, init)


def sharded_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`qkv_proj` holds four parts, each of queries, values and keys of a quarter of the heads."""
    names = "qkv_proj.weight -> {q_proj,v_proj,k_proj}.kernel"
    return (Rule(names, "(m n d) i -> n i (m d)", m=SHARDS), *rules(config, index))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
CODEGEN = Family(DEFAULTS, sharded, sharded_rules, NAMES)
