"""XLNet: Transformer-XL's relative positions, and a bias for tokens of another segment.

The layer is `rel_attn` without the sum with the residual and the norm that follow in there; it is
called `layer(x, segments=...)`. The memory of earlier tokens and the second stream of the training
are not served. Own file: its positions shift the logits in a layer of its own.
"""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_choice
from ..layers import RelativeShiftAttention
from ..masks import CAUSAL, FULL
from ..weights.rule import Rule
from ._config import Config, Family
from ._parts import at


def attention(config: Config, index: int, init: Mapping[str, Any]) -> RelativeShiftAttention:
    """`rel_attn` of XLNetModel."""
    check_choice("attn_type", config["attn_type"], "bi", "uni")
    is_causal = config["attn_type"] == "uni"
    _check_positions(config, is_causal)
    n, h = config.query_heads()
    if config["d_head"] not in (None, 0, h):
        raise ValueError(f"d_head must be d_model / n_head = {h}; got {config['d_head']!r}.")
    return RelativeShiftAttention(
        config.count("hidden_size"),
        n,
        h,
        biases="segment",
        mask=CAUSAL if is_causal else FULL,
        dropout=config.rate("attention_dropout"),
        **init,
    )


def _check_positions(config: Config, is_causal: bool) -> None:
    """Raises ValueError for clamped distances, or those reversed in one half of a batch."""
    if config.flag("bi_data"):
        raise ValueError("bi_data=True is not served: half of a batch is read backwards there.")
    if config["clamp_len"] is not None and config["clamp_len"] > 0:
        raise ValueError(
            f"clamp_len={config['clamp_len']!r} is not served: distances are not cut off here."
        )
    if is_causal and config.flag("same_length"):
        raise ValueError(
            "same_length=True is not served beside attn_type='uni': it needs a memory."
        )


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Rules for projections, which are arrays with an axis of heads."""
    n = config.count("num_attention_heads")
    inner = (Rule(f"{x} -> {x}_proj.kernel", "d n h -> d (n h)", n=n) for x in "qkvr")
    outer = Rule("o -> o_proj.kernel", "d n h -> (n h) d", n=n)
    return (*inner, outer, Rule.skip("layer_norm"))


ROWS = {
    "xlnet": Family(
        attention, rules, {"attention_dropout": ("dropout",)}, path=at("layer.{}.rel_attn")
    )
}
