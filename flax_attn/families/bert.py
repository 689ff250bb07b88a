"""BERT: an encoder whose output projection belongs to the module after attention.

The layer is `attention.self` with the `dense` of `attention.output`: the LayerNorm of the latter,
its sum with the residual and its dropout, `hidden_dropout_prob`, stand outside.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._encoder import multi_head

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "is_decoder": False,
    "attention_probs_dropout_prob": 0.1,
}
NAMES = {"attention_dropout": ("attention_probs_dropout_prob",)}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of BertModel as far as the sum with the residual."""
    is_decoder = config.flag("is_decoder")
    return multi_head(config, init, is_decoder=is_decoder, qkv_bias=True, out_bias=True)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the names inside `attention`; skips its LayerNorm."""
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
    parts = (Rule(f"self.{torch_name} -> {name}") for torch_name, name in names.items())
    return (*parts, Rule("output.dense -> o_proj"), Rule.skip("output.LayerNorm"))


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
