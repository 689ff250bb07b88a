"""The parts of a row: what of a config says which argument of a layer.

A part is a dict of arguments, or a function of a config and the index of a layer that returns one.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flax import nnx

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, FULL
from ..norms import LayerNorm, RMSNorm
from ..rules import Rules
from ..weights.rule import Rule
from ._config import Config, Family
from ._kinds import Kind, causal_window, check_causal, mask_of
from ._rope import rotary, rotary_by_kind

Arguments = Mapping[str, Any]
Chosen = Callable[[Config, int], Arguments]  # arguments that a config chooses
Part = Chosen | Arguments
LayerRules = Callable[[Config, int], tuple[Rule, ...]]


def decoder(
    *parts: Part, layer: Callable[..., nnx.Module] = GroupedQueryAttention, **row: Any
) -> Family:
    """The row of a causal model.

    Args:
      parts: of the row; a later one overrides the arguments of an earlier one.
      layer: its class.
      row: further attributes of `Family`.
    """
    return Family(partial(_built, layer, (*parts, causal_only)), **row)


def encoder(
    *parts: Part, layer: Callable[..., nnx.Module] = GroupedQueryAttention, **row: Any
) -> Family:
    """The row of a model without a mask, with as many key heads as query heads; see `decoder`."""
    return Family(partial(_built, layer, ({"mask": FULL}, multi_head, *parts)), **row)


def _built(
    layer: Callable[..., nnx.Module],
    parts: tuple[Part, ...],
    config: Config,
    index: int,
    init: Mapping[str, Any],
) -> nnx.Module:
    """Builds a layer from a config's sizes and dropout, and the arguments of the parts."""
    arguments: dict[str, Any] = {}
    for part in parts:
        arguments |= part(config, index) if callable(part) else part
    for name in {"q_norm", "k_norm", "o_norm"} & arguments.keys():
        arguments[name] = arguments[name](param_dtype=init["param_dtype"])
    width = config.count("hidden_size")
    heads = arguments.pop("heads", None) or config.heads()
    if "dropout" not in arguments:
        arguments["dropout"] = config.rate("attention_dropout")
    return layer(width, *heads, **arguments, **init)


def hybrid(
    is_first: Callable[[Config, int], bool],
    first: Family,
    second: Family,
    modules: tuple[str, str] | None = None,
    **row: Any,
) -> Family:
    """The row of a model with two kinds of layers.

    Args:
      is_first: whether a layer is of the first kind.
      first, second: the rows of the kinds, of which the attention and the rules are used.
      modules: names of the attentions of either kind, in `layers.{}`; None if they are the same.
      row: further attributes of `Family`.
    """

    def kind(config: Config, index: int) -> Family:
        return first if is_first(config, index) else second

    def path(config: Config, index: int) -> str | None:
        return modules and f"layers.{{}}.{modules[0 if is_first(config, index) else 1]}"

    return Family(
        lambda config, index, init: kind(config, index).attention(config, index, init),
        lambda config, index: kind(config, index).rules(config, index),
        path=path,
        **row,
    )


# Parts of any model.


def causal_only(config: Config, index: int) -> Arguments:
    """No argument; ValueError for a config that asks for bidirectional attention."""
    check_causal(config)
    return {}


def causal_if(field: str) -> Chosen:
    """A causal mask if this field is True."""

    def part(config: Config, index: int) -> Arguments:
        return {"mask": CAUSAL, **causal_only(config, index)} if config.flag(field) else {}

    return part


def multi_head(config: Config, index: int) -> Arguments:
    """As many key heads as query heads."""
    n, h = config.query_heads()
    return {"heads": (n, n, h)}


def biases(field: str = "attention_bias") -> Chosen:
    """Biases of all four projections, or none."""
    return lambda config, index: dict.fromkeys(("qkv_bias", "out_bias"), config.flag(field))


def input_biases(field: str = "attention_bias", out: str = "") -> Chosen:
    """Biases of query, key and value projections.

    Args:
      field: that says so.
      out: the field that says whether the output projection has one; "" if it never has.
    """
    return lambda config, index: {
        "qkv_bias": config.flag(field),
        "out_bias": bool(out) and config.flag(out),
    }


def rotated(
    has_rotary: Callable[[Config, int], bool] | None = None,
    reverse: bool = False,
    always_checked: bool = True,
    **how: Any,
) -> Chosen:
    """A rotary.

    Args:
      has_rotary: which layers have it; None for all.
      reverse: whether it rotates the other way (NanoChat).
      always_checked: whether wrong rotary parameters raise in layers without it too.
      how: keyword arguments of `rotary`.
    """

    def part(config: Config, index: int) -> Arguments:
        has = has_rotary is None or has_rotary(config, index)
        if not has and not always_checked:
            return {"rotary": None}
        built = replace(rotary(config, **how), reverse=reverse)
        return {"rotary": built if has else None}

    return part


def rms_norms(eps: str = "rms_norm_eps", unless_off: str = "", **how: Any) -> Chosen:
    """An RMSNorm of queries and one of keys.

    Args:
      eps: the field with its epsilon.
      unless_off: the field that turns the norms on; "" if the layers always have them.
      how: keyword arguments of `RMSNorm`.
    """

    def part(config: Config, index: int) -> Arguments:
        if unless_off and not config.flag(unless_off):
            return {}
        n, k, h = config.heads() if how.get("over_heads") else (1, 1, config.query_heads()[1])
        widths = (n * h, k * h)
        norm = partial(RMSNorm, eps=config.number(eps), **how)
        return {f"{x}_norm": partial(norm, width) for x, width in zip("qk", widths, strict=True)}

    return part


def layer_norms(field: str, by_head: bool = True, **how: Any) -> Chosen:
    """A LayerNorm of queries and one of keys, if this field is True.

    Args:
      field: that turns them on.
      by_head: whether each head has a scale of its own.
      how: keyword arguments of `LayerNorm`.
    """

    def part(config: Config, index: int) -> Arguments:
        if not config.flag(field):
            return {}
        h = config.query_heads()[1]
        shapes = [(heads, h) for heads in config.heads()[:2]] if by_head else [h, h]
        norm = partial(LayerNorm, eps=config.number("layer_norm_eps"), **how)
        return {f"{x}_norm": partial(norm, shape) for x, shape in zip("qk", shapes, strict=True)}

    return part


def windows(kind: Kind) -> Chosen:
    """The mask of a layer's kind: causal, with a window in "sliding_attention"."""
    return lambda config, index: {"mask": mask_of(config, kind(config, index))}


def by_kind(kind: Kind, **how: Any) -> Chosen:
    """The rotary and the mask of a layer's kind; `how` is as in `rotary_by_kind`."""

    def part(config: Config, index: int) -> Arguments:
        name = kind(config, index)
        return {"rotary": rotary_by_kind(config, name, **how), "mask": mask_of(config, name)}

    return part


def window_if(has_window: Callable[[Config], bool]) -> Chosen:
    """A window in every layer of a config that has one."""
    return lambda config, index: {"mask": causal_window(config) if has_window(config) else CAUSAL}


def scaled(field: str, power: float = 1.0) -> Chosen:
    """The factor of the logits: a field to a power."""
    return lambda config, index: {"rules": Rules(scale=config.number(field) ** power)}


def clipped(config: Config, index: int) -> Arguments:
    """Queries, keys and values clamped to `clip_qkv` (OLMo)."""
    return {"clip_qkv": None if config["clip_qkv"] is None else config.number("clip_qkv")}


# Rules of weights.


def renamed(*sides: str, skipped: str = "") -> LayerRules:
    """Rules that only rename, each `"torch -> flax"`.

    Args:
      sides: of the rules.
      skipped: a weight that is not the attention's.

    >>> print(*renamed("dense -> o_proj")(Config({}, {}), 0))
    Rule("dense -> o_proj")
    """
    rules = (*map(Rule, sides), *([Rule.skip(skipped)] if skipped else ()))
    return lambda config, index: rules


def at(path: str) -> Callable[[Config, int], str]:
    """Returns a row's `path` that is the same for all layers."""
    return lambda config, index: path


has_sliding_window = window_if(lambda config: config["sliding_window"] is not None)
BIASES, ROTARY = biases(), rotated()
HEAD_NORMS = rms_norms(cast="before")  # of each head
QKV_BIASES, ALL_BIASES = {"qkv_bias": True}, {"qkv_bias": True, "out_bias": True}
NO_DROPOUT = {"dropout": 0.0}
