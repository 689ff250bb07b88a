"""GPT-2: one weight for query, key and value, stored (in, out); scaled by layer if configured."""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query
from ._fused import fused

DEFAULTS = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "attn_pdrop": 0.1,
}
NAMES = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_attention_heads"),
    "attention_dropout": ("attn_pdrop",),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of GPT2LMHeadModel, but for its dropout of the output, `resid_pdrop`."""
    n, h = config.query_heads()
    scale = h**-0.5 if config.flag("scale_attn_weights") else 1.0
    if config.flag("scale_attn_by_inverse_layer_idx"):
        scale /= index + 1
    return grouped_query(config, init, heads=(n, n, h), bias=True, rules=Rules(scale=scale))


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """`c_attn` holds the columns of the query, then those of the key and of the value.

    Both weights are stored (in, out), which a file does not show.
    """
    parts = fused("c_attn", "i (n o) -> n i o", bias=True)
    out = (Rule("c_proj.weight -> o_proj.kernel", "i o -> i o"), Rule("c_proj.bias -> o_proj.bias"))
    return (*parts, *out)


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
