"""GPT-Neo: unscaled logits, and a window in every second layer unless configured otherwise."""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_choice
from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, Window
from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._decoder import grouped_query

DEFAULTS = {
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    "attention_types": [[["global", "local"], 12]],
    "attention_layers": None,
    "window_size": 256,
    "attention_dropout": 0.0,
}
NAMES = {
    "num_hidden_layers": ("num_layers", "num_hidden_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
}


def attention(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of GPTNeoForCausalLM, but for its dropout of the output, `resid_dropout`.

    A token that sees nothing but padding is in transformers the mean of the values before it, as
    far as its window reaches; no `empty=` says that.
    """
    n, h = config.query_heads()
    is_local = _kind(config, index) == "local"
    mask = CAUSAL & Window(config.count("window_size") - 1, 0) if is_local else CAUSAL
    parts = {"out_bias": True, "mask": mask, "rules": Rules(scale=1.0)}
    return grouped_query(config, init, heads=(n, n, h), **parts)


def rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Maps the names inside `attn`."""
    parts = (Rule(f"attention.{x}_proj -> {x}_proj") for x in ("q", "k", "v"))
    return (*parts, Rule("attention.out_proj -> o_proj"))


def _kind(config: Config, index: int) -> str:
    """ "global" or "local": `attention_layers`, else what `attention_types` repeat."""
    kinds = config["attention_layers"]
    if kinds is None:
        kinds = [kind for group, times in config["attention_types"] for kind in group * times]
    layers = config.count("num_hidden_layers")
    if len(kinds) != layers:
        raise ValueError(
            "attention_types or attention_layers must name one kind for each of "
            f"{config.name('num_hidden_layers')}={layers}; got {len(kinds)}."
        )
    check_choice(f"attention_layers[{index}]", kinds[index], "global", "local")
    return kinds[index]


FAMILY = Family(DEFAULTS, attention, rules, NAMES)
