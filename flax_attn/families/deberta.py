"""DeBERTa: disentangled attention; the caller passes the embeddings of distances.

Own file: the logits have terms of content and position that no mask or score says. The layer is
`attention.self`: the projection of its output, the sum with the residual and a norm stand in
`attention.output`. It is called `layer(x, rel_embeddings)` with the encoder's rows, normed where
`norm_rel_ebd` says so. In DeBERTa v1 keys have no biases, and each head's query, key and value
stand together.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import DisentangledAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._parts import at

# What DeBERTa-v2 reads, and the first version does not.
UNREAD = {"attention_head_size": None, "position_buckets": -1, "share_att_key": False}
HEADS = "(h n d) i -> n i (h d)"  # each head's query, key and value stand together


def deberta_v2(config: Config, index: int, init: Mapping[str, Any]) -> DisentangledAttention:
    """`attention.self` of DebertaV2Model.

    Raises:
      ValueError: without relative_attention, and for heads of another width than the class' own.
    """
    _, h = config.query_heads()
    if config["attention_head_size"] not in (None, h):
        raise ValueError(
            f"attention_head_size={config['attention_head_size']!r} is not served: heads have "
            f"hidden_size / num_attention_heads = {h} components."
        )
    return disentangled(config, init)


def disentangled(
    config: Config, init: Mapping[str, Any], *, key_bias: bool = True
) -> DisentangledAttention:
    """The layer of a config; ValueError without relative_attention."""
    if not config.flag("relative_attention"):
        raise ValueError(
            "relative_attention=False is not served: without distances it is the attention of BERT."
        )
    return DisentangledAttention(
        config.count("hidden_size"),
        config.query_heads()[0],
        terms=terms_of(config),
        buckets=count_or_none(config, "position_buckets"),
        max_positions=count_or_none(config, "max_relative_positions")
        or config.count("max_position_embeddings"),
        share=config.flag("share_att_key"),
        key_bias=key_bias,
        dropout=config.rate("attention_dropout"),
        **init,
    )


def terms_of(config: Config) -> tuple[str, ...]:
    """The terms of the logits, given as a list or as a string separated by bars."""
    named = config["pos_att_type"]
    named = named.lower().split("|") if isinstance(named, str) else named
    if not isinstance(named, list | tuple) or not {str(x).strip() for x in named} <= {"c2p", "p2c"}:
        raise ValueError(
            f"pos_att_type must list c2p, p2c or both; got {config['pos_att_type']!r}."
        )
    return tuple(word for word in ("c2p", "p2c") if word in map(str.strip, named))


def count_or_none(config: Config, name: str) -> int | None:
    """The count, or None if it is not above zero, which means unset."""
    return None if config[name] is None or config.whole(name) <= 0 else config.count(name)


def deberta(config: Config, index: int, init: Mapping[str, Any]) -> DisentangledAttention:
    """`attention.self` of DebertaModel.

    Raises:
      ValueError: with talking_head, and as DeBERTa-v2 does.
    """
    if config.flag("talking_head"):
        raise ValueError("talking_head=True is not served: the layer does not mix its heads.")
    return disentangled(config.replaced(**UNREAD), init, key_bias=False)


def deberta_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps names; biases of queries and values are parameters next to the projection."""
    names = {"q_bias": "query_proj.bias", "v_bias": "value_proj.bias"}
    names |= {"pos_proj": "pos_key_proj", "pos_q_proj": "pos_query_proj"}
    terms = terms_of(config)
    needs = {"pos_proj": "c2p" in terms, "pos_q_proj": "p2c" in terms}
    heads = config.count("num_attention_heads")
    fused = "in_proj.weight -> {query_proj,key_proj,value_proj}.kernel"
    renamed = (Rule(f"{x} -> {y}") for x, y in names.items() if needs.get(x, True))
    return (Rule(fused, HEADS, h=heads), *renamed)


NAMES = {"attention_dropout": ("attention_probs_dropout_prob",)}
PATH = at("encoder.layer.{}.attention.self")
ROWS: Mapping[str, Family] = {
    "deberta": Family(deberta, deberta_rules, NAMES, {"talking_head": False}, path=PATH),
    "deberta-v2": Family(deberta_v2, names=NAMES, defaults=UNREAD, path=PATH),
}
