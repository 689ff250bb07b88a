"""DeBERTa v1: relative position embeddings by distance, and keys without biases.

The layer is `attention.self`, called as that of DeBERTa-v2: the projection of its output stands in
`attention.output`.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import DisentangledAttention
from ..weights.rule import Rule
from . import deberta_v2
from ._config import Config, Family
from ._parts import at

# What DeBERTa-v2 reads, and this class does not.
UNREAD = {"attention_head_size": None, "position_buckets": -1, "share_att_key": False}
DEFAULTS = {k: v for k, v in deberta_v2.DEFAULTS.items() if k not in UNREAD}
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
HEADS = "(h n d) i -> n i (h d)"  # each head's query, key and value stand together


def attention(config: Config, index: int, init: Mapping[str, Any]) -> DisentangledAttention:
    """`attention.self` of DebertaModel.

    Raises:
      ValueError: with talking_head, and as DeBERTa-v2 does.
    """
    if config.flag("talking_head"):
        raise ValueError("talking_head=True is not served: the layer does not mix its heads.")
    return deberta_v2.disentangled(config.replaced(**UNREAD), init, key_bias=False)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps names; biases of queries and values are parameters next to the projection."""
    names = {"q_bias": "query_proj.bias", "v_bias": "value_proj.bias"}
    names |= {"pos_proj": "pos_key_proj", "pos_q_proj": "pos_query_proj"}
    terms = deberta_v2.terms_of(config)
    needs = {"pos_proj": "c2p" in terms, "pos_q_proj": "p2c" in terms}
    heads = config.count("num_attention_heads")
    fused = "in_proj.weight -> {query_proj,key_proj,value_proj}.kernel"
    renamed = (Rule(f"{x} -> {y}") for x, y in names.items() if needs.get(x, True))
    return (Rule(fused, HEADS, h=heads), *renamed)


FAMILY = Family(
    {**DEFAULTS, **SIZES, "talking_head": False},
    attention,
    rules,
    deberta_v2.NAMES,
    path=at("encoder.layer.{}.attention.self"),
)
