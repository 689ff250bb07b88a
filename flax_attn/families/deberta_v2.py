"""DeBERTa-v2 and v3: disentangled attention; the caller passes the embeddings of distances.

The layer is `attention.self`: the projection of its output, the sum with the residual and a norm
stand in `attention.output`. It is called `layer(x, rel_embeddings)` with the encoder's rows, normed
where `norm_rel_ebd` says so.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import DisentangledAttention
from ._config import Config, Family
from ._parts import at

DEFAULTS = {
    "hidden_size": 1536,
    "num_hidden_layers": 24,
    "num_attention_heads": 24,
    "attention_head_size": None,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "relative_attention": False,
    "max_relative_positions": -1,
    "position_buckets": -1,
    "pos_att_type": None,
    "share_att_key": False,
}
NAMES = {"attention_dropout": ("attention_probs_dropout_prob",)}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> DisentangledAttention:
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
        buckets=count_or_none(config["position_buckets"]),
        max_positions=count_or_none(config["max_relative_positions"])
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
    if not isinstance(named, list | tuple) or not {*map(str.strip, named)} <= {"c2p", "p2c"}:
        raise ValueError(
            f"pos_att_type must list c2p, p2c or both; got {config['pos_att_type']!r}."
        )
    return tuple(word for word in ("c2p", "p2c") if word in map(str.strip, named))


def count_or_none(count: Any) -> int | None:
    """The count, or None if it is not above zero, which means unset."""
    return count if count is not None and count > 0 else None


FAMILY = Family(DEFAULTS, attention, names=NAMES, path=at("encoder.layer.{}.attention.self"))
