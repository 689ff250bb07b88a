"""Llama: grouped queries with rotary positions in every scaling, and biases on all or none."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import decoder_fields, grouped_query
from ._gguf import names, unpermuted
from ._rope import rotary

DEFAULTS = {
    **decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0),
    "attention_bias": False,
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of LlamaForCausalLM."""
    return grouped_query(config, init, bias=config.flag("attention_bias"), rotary=rotary(config))


def with_one_bias(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of InternLM3, with all biases or none.

    Raises:
      ValueError: for a bias in the attention alone, or in the rest alone.
    """
    names = [config.name("attention_bias"), config.name("mlp_bias")]
    biases = [config["attention_bias"], config["mlp_bias"]]
    if biases[0] != biases[1]:
        values = " and ".join(f"{name}={x!r}" for name, x in zip(names, biases, strict=True))
        raise ValueError(f"{values} are not served: in transformers they must be the same.")
    return attention(config, index, init)


def gguf(config: Config, index: int) -> tuple[Rule, ...]:
    """llama.cpp rotates neighbouring components, so its query and key rows are stored in pairs."""
    n, k, _ = config.heads()
    bias = config.flag("attention_bias")
    return (*unpermuted("q", n, bias), *unpermuted("k", k, bias), *names("v", "output"))


FAMILY = Family(DEFAULTS, attention, gguf=gguf)
