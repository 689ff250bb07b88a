"""ViT: an image encoder with biases on query, key and value unless configured otherwise.

The names are those of the modules in transformers 5. Older files hold `attention.query`,
`attention.key`, `attention.value` and `output.dense` in their place, and name no head_dim.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ._config import Config, Family
from ._encoder import multi_head

DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "head_dim": None,  # no field of the class, which uses one all the same
    "qkv_bias": True,
    "attention_probs_dropout_prob": 0.0,
}
NAMES = {"attention_dropout": ("attention_probs_dropout_prob",)}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of ViTModel."""
    return multi_head(config, init, qkv_bias=config.flag("qkv_bias"), out_bias=True)


FAMILY = Family(DEFAULTS, attention, names=NAMES)
