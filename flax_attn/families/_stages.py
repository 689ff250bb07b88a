"""Image encoders in stages of several blocks each; `index` counts the blocks of all stages."""

from collections.abc import Callable, Mapping
from typing import Any

from .._internal.checks import check_divides, check_positive
from ..layers import SpatialReductionAttention
from ..weights.rule import Rule
from ._config import Config, Family

SEGFORMER = {
    "num_encoder_blocks": 4,
    "depths": (2, 2, 2, 2),
    "sr_ratios": (8, 4, 2, 1),
    "hidden_sizes": (32, 64, 160, 256),
    "num_attention_heads": (1, 2, 5, 8),
    "attention_probs_dropout_prob": 0.0,
}
PVT = {
    **{"num_encoder_blocks": 4, "depths": (2, 2, 2, 2), "qkv_bias": True},
    **{"sequence_reduction_ratios": (8, 4, 2, 1), "hidden_sizes": (64, 128, 320, 512)},
    **{"num_attention_heads": (1, 2, 5, 8), "attention_probs_dropout_prob": 0.0},
    "layer_norm_eps": 1e-6,
}
DROPOUT = {"attention_dropout": ("attention_probs_dropout_prob",)}
NAMES = {**DROPOUT, "num_encoder_blocks": ("num_encoder_blocks", "num_hidden_layers")}


def depths(config: Config) -> tuple[int, ...]:
    """Number of blocks of each stage; num_encoder_blocks or the list sets the number of stages.

    Raises:
      ValueError: for no list, fewer entries than stages, or an entry that is not a count.
    """
    each = config["depths"]
    if "num_encoder_blocks" in config.defaults:
        stages = config.count("num_encoder_blocks")
    else:
        stages = len(each) if isinstance(each, list | tuple) else 0
    if stages == 0:
        raise ValueError(f"depths must have a count for each stage; got {each!r}.")
    return tuple(entry(config, "depths", stage) for stage in range(stages))


def entry(config: Config, name: str, stage: int) -> int:
    """Returns the entry of one stage from a field with a count for each stage.

    Raises:
      ValueError: if the field is not a list of that length, or the entry is not a count.
    """
    each, called = config[name], config.name(name)
    if not isinstance(each, list | tuple) or len(each) <= stage:
        raise ValueError(f"{called} must have a count for each stage, from 0 on; got {each!r}.")
    check_positive(**{f"{called}[{stage}]": each[stage]})
    return each[stage]


def stage_and_block(each: tuple[int, ...], index: int) -> tuple[int, int]:
    """The stage of a block and its index in the stage, both from 0.

    >>> stage_and_block((2, 3), 4)
    (1, 2)
    """
    stage = 0
    while index >= each[stage]:
        index, stage = index - each[stage], stage + 1
    return stage, index


def counted(config: Config) -> Config:
    """Returns the config with the blocks of all stages as its layers."""
    return config.replaced(num_hidden_layers=sum(depths(config)))


def stage_of(config: Config, index: int) -> tuple[int, int]:
    """The stage of a block and its index in the stage."""
    return stage_and_block(depths(config), index)


def reduced(
    config: Config, stage: int, ratios: str, init: Mapping[str, Any], **layer_kwargs: Any
) -> SpatialReductionAttention:
    """Builds the layer of a stage.

    Args:
      config: of the model.
      stage: from 0.
      ratios: the field with the reduction ratio of each stage.
      init: rngs and dtypes.
      layer_kwargs: further arguments of the layer.
    """
    width, heads = (entry(config, x, stage) for x in ("hidden_sizes", "num_attention_heads"))
    check_divides("num_attention_heads of a stage", heads, "its hidden_sizes", width)
    dropout = config.rate("attention_dropout")
    ratio = entry(config, ratios, stage)
    return SpatialReductionAttention(width, heads, ratio, dropout=dropout, **layer_kwargs, **init)


def segformer(config: Config, index: int, init: Mapping[str, Any]) -> SpatialReductionAttention:
    """`attention` of SegformerModel, over an image `*B Y X D`."""
    return reduced(config, stage_of(config, index)[0], "sr_ratios", init, eps=1e-5)


def segformer_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Renames the projections of transformers 5, and the reduction, which has its own module."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "dense"}
    projections = tuple(Rule(f"{torch_name} -> {name}") for torch_name, name in names.items())
    if entry(config, "sr_ratios", stage_of(config, index)[0]) == 1:
        return projections
    parts = ("sequence_reduction", "layer_norm")
    return (*projections, *(Rule(f"sequence_reduction.{part} -> {part}") for part in parts))


def pvt(config: Config, index: int, init: Mapping[str, Any]) -> SpatialReductionAttention:
    """`attention` of PvtModel; the last stage, with a class token, takes an image of one row.

    Raises:
      ValueError: for a reduction in the last stage, which its class token makes impossible.
    """
    stage, ratios = stage_of(config, index)[0], "sequence_reduction_ratios"
    if stage == config["num_encoder_blocks"] - 1 and entry(config, ratios, stage) > 1:
        raise ValueError(
            "sequence_reduction_ratios must end with 1, since the last stage has a class token; "
            f"got {config[ratios]!r}."
        )
    layer_kwargs = {"qkv_bias": config.flag("qkv_bias"), "eps": config.number("layer_norm_eps")}
    return reduced(config, stage, ratios, init, **layer_kwargs)


def pvt_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """All weights but the output projection are in a submodule `self`."""
    stage = stage_of(config, index)[0]
    names = ["query", "key", "value"]
    if entry(config, "sequence_reduction_ratios", stage) > 1:
        names += ["sequence_reduction", "layer_norm"]
    return (*(Rule(f"self.{x} -> {x}") for x in names), Rule("output.dense -> dense"))


def at_block(path: str) -> Callable[[Config, int], str]:
    """Returns the `path` of a family with stages: {} for the stage, then {} for the block."""
    return lambda config, index: path.format(*stage_of(config, index))


STAGES: Mapping[str, Family] = {
    "pvt": Family(
        PVT,
        pvt,
        pvt_rules,
        DROPOUT,
        path=at_block("encoder.block.{}.{}.attention"),
        derived=counted,
    ),
    "segformer": Family(
        SEGFORMER,
        segformer,
        segformer_rules,
        NAMES,
        path=at_block("stages.{}.blocks.{}.attention"),
        derived=counted,
    ),
}
